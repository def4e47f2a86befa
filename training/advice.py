"""What a result is worth, why it is no better, and what to try."""
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from data.sources import BUILT_IN
from plan.plan import Plan
from plan.remarks import TRAINED_NETWORK, on_few_images
from plan.run_folder import top1_of
from plan.settings import Settings

QUANTILE = 1.959964  # of the normal distribution, two-sided 95 %
LEARNED = 0.1  # top-1 that training gains on guessing if it has learned anything
GAP = 0.2  # of training's top-1 over validation's, from which a network over-fits
LEARNS_UP_TO = 0.9  # training's top-1, up to which more epochs help
GOOD = 0.95  # top-1 from which the remark on few images is not repeated
FEW_UPDATES = 300  # with which hardly any network learns
VISITS = 10  # of each image, from which a network may know it by heart
SMALL_IMAGES = 128  # pixels
CONFUSED, ERRORS = 0.25, 20  # share of the errors that one pair of classes has, of at least so many


def interval(accuracy: float, samples: int) -> tuple[float, float]:
    """Returns the bounds of Wilson's 95 % interval of an accuracy that was measured on so many samples, from 0 to 1."""
    square = QUANTILE**2 / samples
    centre = accuracy + square / 2
    half = QUANTILE * math.sqrt(accuracy * (1 - accuracy) / samples + square / (4 * samples))
    return max(0.0, (centre - half) / (1 + square)), min(1.0, (centre + half) / (1 + square))  # but for rounding


def is_guessing(accuracy: float, samples: int, guess: float) -> bool:
    """Whether an accuracy may be one of guessing. guess: that of always naming the most frequent class."""
    return interval(accuracy, samples)[0] <= guess


@dataclass(frozen=True)
class Ending:
    """The end of a training.

    rows: of metrics.jsonl. summary: content of summary.json. classes: their names. outcomes: of the last evaluation,
    as training.evaluate.Validation has them, float32 (samples, 4).
    """

    settings: Settings
    plan: Plan
    rows: list[dict]
    summary: dict
    classes: tuple[str, ...]
    outcomes: np.ndarray

    @property
    def top1(self) -> float:
        return top1_of(self.summary)

    @property
    def train_top1(self) -> float:
        return self.rows[-1]["train_top1"]


def advice(end: Ending) -> list[str]:
    """Returns sentences in plain text: why a result is no better, and the flags to try."""
    if not end.rows or end.summary.get("epochs_to_target") is not None:  # what was wanted is reached
        return []
    found = _too_short(end) or _not_learned(end) or _not_finished(end) or _over_fitted(end)
    repeated = on_few_images(end.settings) if end.top1 < GOOD and TRAINED_NETWORK not in "".join(found) else []
    return [*found, *(f"{line[0].upper()}{line[1:]}." for line in repeated), *_confused(end)]


def _too_short(end: Ending) -> list[str]:
    plan = end.plan
    if plan.steps >= FEW_UPDATES or end.train_top1 > LEARNS_UP_TO:
        return []
    epochs = math.ceil(plan.epochs * max(2, FEW_UPDATES / plan.steps))
    return [f"{plan.steps} updates are few: top-1 in training has only reached {end.train_top1:.1%}. "
            f"Train longer, with --epochs={epochs}."]


def _not_learned(end: Ending) -> list[str]:
    samples, rate = end.summary["val_samples"], end.plan.learning_rate.peak
    guess = end.summary["val_guess_count"] / samples
    if not is_guessing(end.top1, samples, guess) or end.train_top1 >= guess + LEARNED:
        return []
    return [f"The network has not begun to learn: its top-1 in training is {end.train_top1:.1%}, too. Try a lower "
            f"learning rate, such as {rate / 10:.2g} in place of {rate:.2g} at its peak, or compare several with "
            "`python -m experiments.sweep`."]


def _not_finished(end: Ending) -> list[str]:
    """Validation has risen by more than its interval in the last quarter, and training has far to go, too."""
    last, lowest = end.rows[-1], interval(end.top1, end.summary["val_samples"])[0]
    before = [row for row in end.rows if row["epoch"] <= 0.75 * last["epoch"]]
    if end.train_top1 > LEARNS_UP_TO or not before or lowest <= max(map(top1_of, before)):
        return []
    recipe, best = end.settings.recipe, max(before, key=top1_of)
    size = recipe.final_image_size
    larger = "" if size >= SMALL_IMAGES or recipe.data_dir in BUILT_IN else (
        f" Larger images may show more: --image_size={2 * size}.")
    return [f"Validation was still rising, from {top1_of(best):.1%} at epoch {best['epoch']:g} to {end.top1:.1%}, and "
            f"training is at {end.train_top1:.1%}. Train longer, with --epochs={2 * recipe.epochs:g}.{larger}"]


def _over_fitted(end: Ending) -> list[str]:
    visits = end.rows[-1]["epoch"]
    if (end.train_top1 <= LEARNS_UP_TO and visits < VISITS) or end.train_top1 - end.top1 < GAP:
        return []
    if end.train_top1 <= interval(end.top1, end.summary["val_samples"])[1]:
        return []
    images = round(end.plan.train_samples / len(end.classes))
    return [f"Top-1 is {end.train_top1:.1%} in training and {end.top1:.1%} in validation: the network knows its "
            f"training images by heart, about {images:,} of each class. {_for_few_images(end)}"]


def _for_few_images(end: Ending) -> str:
    settings = end.settings
    if settings.recipe.data_dir not in BUILT_IN and not settings.has_initial_weights:
        return f"A network that knows ImageNet needs fewer images: {TRAINED_NETWORK}."
    if not settings.recipe.mixup:
        return "More images help, or mixing them: --mixup=0.2."
    return "More images help."


def _confused(end: Ending) -> list[str]:
    labels, predicted = end.outcomes[:, :2].astype(int).T
    wrong = Counter(pair for pair in zip(labels.tolist(), predicted.tolist(), strict=True) if pair[0] != pair[1])
    [((label, other), count)] = wrong.most_common(1) or [((0, 0), 0)]
    if len(end.classes) < 3 or wrong.total() < ERRORS or count < CONFUSED * wrong.total():
        return []
    return [f"{count} of {wrong.total()} errors are {end.classes[label]} taken for {end.classes[other]}. The worst "
            "errors, in report.html, show whether their labels are right."]
