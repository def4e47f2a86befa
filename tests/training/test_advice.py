"""What a result is worth and what to try: made-up endings of a training, and the interval against SciPy's."""
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import binomtest

from optim.schedules import Piecewise
from plan.recipes import SMALL
from plan.settings import Run, Settings
from training.advice import Ending, advice, interval, is_guessing


@pytest.mark.parametrize(("hits", "samples"), [(7, 7), (0, 5), (356, 360), (107, 1000), (1, 2), (37_950, 50_000)])
def test_the_interval_is_wilsons(hits, samples):
    expected = binomtest(hits, samples).proportion_ci(0.95, "wilson")
    assert interval(hits / samples, samples) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_chance_is_called_so():
    """10.7 % of 1,000 images of ten classes; 12 % would be better, and so is 7 of 7 where half are of one class."""
    assert is_guessing(0.107, 1000, 0.1) and not is_guessing(0.13, 1000, 0.1)
    assert not is_guessing(1.0, 7, 4 / 7) and is_guessing(1.0, 2, 0.5)


def ending(train_top1, *val_top1s, steps=1000, wrong=(), size=64, data_dir="DATA", mixup=0.0, trained=False,
           source=None, val_loss=1.0, own=(), rate=0.1, more_epochs=8, samples=200):
    """A training of 8 epochs on ten classes of 50 images. wrong: pairs of classes, one for each error that is given.

    own: flags of the command line. rate, more_epochs: of the recipe without it.
    """
    recipe = SimpleNamespace(data_dir=data_dir, mixup=mixup, final_image_size=size, epochs=8, pretrained=trained,
                             learning_rate=Piecewise.parse("0.4"))
    original = SimpleNamespace(epochs=more_epochs, learning_rate=Piecewise.parse(str(rate)))
    plan = SimpleNamespace(steps=steps, epochs=8, train_samples=500, learning_rate=None)
    epochs = np.linspace(0, 8, len(val_top1s) + 1)[1:].tolist()
    rows = [{"epoch": epoch, "train_top1": train_top1, "val_top1": top1, "val_loss": val_loss}
            for epoch, top1 in zip(epochs, val_top1s, strict=True)]
    outcomes = np.array([(label, predicted, 1, 1) for label, predicted in wrong] + [(0, 0, 0, 0)], np.float32)
    settings = Settings(recipe, None, Run(), {}, "", source, original=original,
                        origins=dict.fromkeys(own, "command line"))
    summary = {"val_top1": val_top1s[-1], "val_samples": samples, "val_guess_count": samples // 10}
    return Ending(settings, plan, rows, summary, tuple("abcdefghij"), outcomes)


BY_HEART = ("Top-1 is 96.0% in training and 31.0% in validation: the network knows its training images by heart, "
            "about 50")
IDLE = "The network has not begun to learn: its top-1 in training is 11.0%, too."
RISING = "Validation was still rising, from 40.0% at epoch 6 to 60.0%, and training is at 62.0%. "


@pytest.mark.parametrize(("end", "expected"), [
    (ending(0.98, 0.9, 0.95, 0.96, 0.96), []),
    (ending(0.51, 0.1, 0.12, steps=24), ["24 updates are few: top-1 in training has only reached 51.0%. Train longer, "
                                         "with --epochs=100."]),  # 300 updates
    (ending(0.7, 0.4, 0.4), []),  # no image was seen more than 8 times
    (ending(0.51, 0.1, 0.12, steps=24, more_epochs=40), [
        "24 updates are few: top-1 in training has only reached 51.0%. Leave out --epochs=8: the recipe has 40."]),
    (ending(0.11, 0.1, 0.12), [f"{IDLE} The learning rate is the recipe's, so look at the images in report.html: can "
                               "the classes be told apart, and are the labels right?"]),
    (ending(0.11, 0.1, 0.12, own=["learning_rate"], rate=0.3), [
        f"{IDLE} Compare learning rates: `python -m experiments.sweep --sweep=learning_rate=0.04,0.4,4` with the same "
        "flags."]),
    (ending(0.11, 0.1, 0.12, own=["learning_rate"]), [
        "--learning_rate=0.4 is far from the recipe's 0.1. Leave it out first."]),
    (ending(0.92, 0.8, 0.9, own=["learning_rate"], rate=40), [
        "--learning_rate=0.4 is far from the recipe's 40. Leave it out first."]),
    (ending(0.92, 0.8, 0.9, own=["learning_rate", "optimizer"], rate=40), []),
    (ending(0.92, 0.8, 0.9, val_loss=31.0), [
        "Validation loss was as high as 31 in the second half, where guessing has 2.3. A third of the learning rate "
        "may be steadier."]),
    (ending(0.92, 0.8, 0.9, samples=20), [
        "20 validation images tell little: top-1 is between 70% and 97%. Set more of them aside (`data.prepare "
        "--validation_fraction`)."]),
    (ending(0.11, 0.1, 0.12, wrong=[(1, 2)] * 20, own=["learning_rate"]), [
        "--learning_rate=0.4 is far from the recipe's 0.1. Leave it out first."]),
    (ending(0.96, 0.3, 0.31), [f"{BY_HEART} of each class. A network that knows ImageNet needs fewer images: "
                               "--model=keras:MobileNetV3Small --pretrained."]),
    (ending(0.96, 0.3, 0.31, trained=True), [f"{BY_HEART} of each class. More images help, or mixing them: "
                                             "--mixup=0.2."]),
    (ending(0.96, 0.3, 0.31, data_dir="digits", mixup=0.2), [f"{BY_HEART} of each class. More images help."]),
    (ending(0.62, 0.2, 0.3, 0.4, 0.6), [f"{RISING}Train longer, with --epochs=16. Larger images may show more: "
                                        "--image_size=128."]),
    (ending(0.62, 0.2, 0.3, 0.4, 0.6, size=224), [f"{RISING}Train longer, with --epochs=16."]),
    (ending(0.92, 0.8, 0.81, source=SMALL), ["Few images: a network that knows ImageNet usually reaches more, with "
                                             "--model=keras:MobileNetV3Small --pretrained."]),
    (ending(0.97, 0.8, 0.96, source=SMALL), []),
    (ending(0.62, 0.2, 0.3, 0.58, 0.6), []),  # 60 % of 200 images may be 53 to 67 %
    (ending(0.96, 0.2, 0.9, 0.91, 0.94, wrong=[(1, 2)] * 5 + [(3, 4)] * 15),
     ["15 of 20 errors are d taken for e. The worst errors, in report.html, show whether their labels are right."]),
    (ending(0.96, 0.2, 0.9, 0.91, 0.94, wrong=[(label, 9) for label in range(9)] * 3), []),
])
def test_a_result_says_what_to_try(end, expected):
    assert advice(end) == expected


@pytest.mark.parametrize("row", [{"epoch": 1}, {"epoch": 1, "train_top1": 0.1, "val_top1": 0.1, "val_loss": None}])
def test_rows_that_lack_a_value_are_left_out(row):
    """A loss that is not a number is null in metrics.jsonl."""
    end = ending(0.11, 0.1, 0.12)
    assert advice(replace(end, rows=[row, *end.rows])) == advice(end) and advice(replace(end, rows=[row])) == []
