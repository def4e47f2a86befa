"""Random data that stays on the device."""
import numpy as np
import pytest

from common.errors import UserError
from data.named import open_named
from data.synthetic import SyntheticFeed


@pytest.mark.parametrize("name", ["synthetic:", "synthetic:-1", "synthetic:0", "synthetic:1e6", "synthetic:9999999999"])
def test_a_size_is_a_number(name):
    with pytest.raises(UserError, match="number of training samples"):
        open_named(name)


def test_the_same_batch_again_and_again():
    dataset = open_named("synthetic:1000")
    assert (dataset.train.samples, dataset.validation.samples, len(dataset.classes)) == (1000, 40, 1000)
    feed = SyntheticFeed(dataset, 16, seed=1, shard=1, shards=3)
    with feed.train(0, 5, 96, 32) as batches, feed.train(96, 5, 96, 32) as later:
        images, labels = next(batches)
        assert next(later)[0] is images and batches.iterator is later.iterator
    assert images.shape == (32, 16, 16, 3) and images.dtype == np.uint8 and labels.shape == (32, 1)
    assert labels.numpy().min() >= 0 and labels.numpy().max() < 1000
    assert abs(images.numpy().mean() - 127.5) < 2 and abs(images.numpy().std() - 73.9) < 2
    samples = []
    for shard in range(3):
        with SyntheticFeed(dataset, 16, 1, shard, 3).validation(32) as (_, count):
            samples.append(count)
    assert sum(samples) == 40
