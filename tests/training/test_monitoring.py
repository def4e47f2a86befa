"""The training images in a report, against mixing in NumPy."""
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from data.mixing import NOT_MIXED, Mixing
from training.monitoring import shares, training_images


def test_mixed_images_are_shown_with_both_labels(digits):
    feed = Feed(open_dataset(digits), 16, AUGMENTATIONS["none"], seed=3, mixing=Mixing(0.4, 1.0))
    plan = SimpleNamespace(phases=[SimpleNamespace(image_size=None)])
    shown, names = training_images(SimpleNamespace(feed=feed, plan=plan), 16, largest=128)
    plain, classes = training_images(
        SimpleNamespace(feed=dataclasses.replace(feed, mixing=NOT_MIXED), plan=plan), 16, largest=128)
    rows = feed.mixing.random_numbers(16, 3, np.arange(16)).astype(float)
    for index, (pixels, label, top, left, bottom, right) in enumerate(rows):
        own = np.full((16, 16, 1), pixels)
        own[int(top):int(bottom), int(left):int(right)] = 0
        expected = own * plain[index] + (1 - own) * plain[index ^ 1]
        assert np.abs(shown[index] - expected).max() <= 0.5 + 1e-3
        weights = {classes[index]: label} | {classes[index ^ 1]: 1 - label}
        if classes[index] != classes[index ^ 1] and 0.01 < label < 0.99:
            found = dict(part.rsplit(" ", 1) for part in names[index].split(", "))
            assert {name: float(share[:-1]) / 100 for name, share in found.items()} == pytest.approx(weights, abs=0.006)
    assert shown.dtype == np.uint8 and len({*names}) > 4


@pytest.mark.parametrize(("own", "other", "weight", "shown"), [
    ("cat", "dog", 0.7, "cat 70%, dog 30%"), ("cat", "dog", 0.2, "dog 80%, cat 20%"), ("cat", "dog", 1.0, "cat"),
    ("cat", "dog", 0.001, "dog"), ("cat", "cat", 0.5, "cat")])
def test_the_label_of_a_mixed_image(own, other, weight, shown):
    assert shares(own, other, weight) == shown
