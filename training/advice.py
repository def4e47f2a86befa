"""What a result is worth, why it is no better, and what to try."""
import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from data.sources import BUILT_IN
from plan.plan import Plan
from plan.remarks import TRAINED_NETWORK, on_few_images
from plan.run_folder import top1_of
from plan.settings import Settings
from training.divergence import Diverged

QUANTILE = 1.959964  # of the normal distribution, two-sided 95 %
LEARNED = 0.1  # top-1 that training gains on guessing if it has learned anything
GAP = 0.2  # of training's top-1 over validation's, from which a network over-fits
LEARNS_UP_TO = 0.9  # training's top-1, up to which more epochs help
GOOD = 0.95  # top-1 from which there is nothing to mend
FEW_UPDATES = 300  # with which hardly any network learns
VISITS = 10  # of each image, from which a network may know it by heart
OTHER_RATE = 3  # factor to the recipe's learning rate, from which it is the first suspect
EXPLODED = 3  # times the loss of guessing: a validation loss that the learning rate has driven up
WIDE = 0.2  # interval of the top-1, from which there are too few validation images
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

    @property
    def samples(self) -> int:
        """Number of validation images."""
        return self.summary["val_samples"]

    @property
    def bounds(self) -> tuple[float, float]:
        return interval(self.top1, self.samples)

    @property
    def guess(self) -> float:
        """Top-1 of always naming the most frequent class."""
        return self.summary["val_guess_count"] / self.samples

    @property
    def is_guessing(self) -> bool:
        return is_guessing(self.top1, self.samples, self.guess)


def advice(end: Ending) -> list[str]:
    """Returns sentences in plain text: why a result is no better, and the flags to try."""
    whole = [row for row in end.rows if None not in (row.get("train_top1"), row.get("val_top1"), row.get("val_loss"))]
    if not whole or end.summary.get("epochs_to_target") is not None:  # what was wanted is reached
        return []
    end = replace(end, rows=whole)
    found = [] if end.top1 >= GOOD else (
        _other_rate(end) or _too_short(end) or _not_learned(end) or _unsteady(end) or _not_finished(end)
        or _over_fitted(end) or [*map(as_sentence, on_few_images(end.settings))])
    return [*found, *_confused(end), *_few_to_judge(end)]


def as_sentence(line: str) -> str:
    """Returns a line of the terminal as a sentence."""
    return f"{line[0].upper()}{line[1:]}."


def own_rate(settings: Settings) -> tuple[float, float] | None:
    """Returns a learning rate that is far from the recipe's, and the recipe's: both the largest, before scaling.

    None if it is not far from it, or belongs to another optimizer or batch size.
    """
    recipe, original = settings.recipe, settings.original
    ours, theirs = max(recipe.learning_rate.values), max(original.learning_rate.values)
    if not settings.is_given("learning_rate") or settings.is_given("optimizer") or settings.is_given("batch_size"):
        return None
    return None if theirs / OTHER_RATE < ours < theirs * OTHER_RATE else (ours, theirs)


def after_divergence(problem: Diverged, settings: Settings) -> str:
    """Returns what to try after a divergence."""
    rates = own_rate(settings) if problem.is_of_samples else None
    return f"{problem.advice}; the recipe's learning rate is {rates[1]:g}" if rates else problem.advice


def _other_rate(end: Ending) -> list[str]:
    if not (rates := own_rate(end.settings)):
        return []
    return [f"--learning_rate={rates[0]:g} is far from the recipe's {rates[1]:g}. Leave it out first."]


def _too_short(end: Ending) -> list[str]:
    if end.plan.steps >= FEW_UPDATES or end.train_top1 > LEARNS_UP_TO:
        return []
    said = f"{end.plan.steps} updates are few: top-1 in training has only reached {end.train_top1:.1%}."
    return [f"{said} {_longer(end, max(2, FEW_UPDATES / end.plan.steps))}"]


def _longer(end: Ending, factor: float) -> str:
    """Returns how to train longer. factor: to the epochs, unless the recipe has more of its own."""
    recipe, original = end.settings.recipe, end.settings.original
    if original.epochs > recipe.epochs:
        return f"Leave out --epochs={recipe.epochs:g}: the recipe has {original.epochs:g}."
    return f"Train longer, with --epochs={math.ceil(end.plan.epochs * factor)}."


def _not_learned(end: Ending) -> list[str]:
    if not end.is_guessing or end.train_top1 >= end.guess + LEARNED:
        return []
    said = f"The network has not begun to learn: its top-1 in training is {end.train_top1:.1%}, too."
    if not end.settings.is_given("learning_rate"):
        return [f"{said} The learning rate is the recipe's, so look at the images in report.html: can the classes "
                "be told apart, and are the labels right?"]
    rate = max(end.settings.recipe.learning_rate.values)
    return [f"{said} Compare learning rates: `python -m experiments.sweep --sweep=learning_rate={rate / 10:g},{rate:g},"
            f"{10 * rate:g}` with the same flags."]


def _unsteady(end: Ending) -> list[str]:
    """The validation loss was far above that of guessing, with which a training starts."""
    highest = max(row["val_loss"] for row in end.rows[len(end.rows) // 2:])
    if highest <= EXPLODED * math.log(len(end.classes)):
        return []
    return [f"Validation loss was as high as {highest:.4g} in the second half, where guessing has "
            f"{math.log(len(end.classes)):.2g}. A third of the learning rate may be steadier."]


def _not_finished(end: Ending) -> list[str]:
    """Validation has risen by more than its interval in the last quarter, and training has far to go, too."""
    before = [row for row in end.rows if row["epoch"] <= 0.75 * end.rows[-1]["epoch"]]
    if end.train_top1 > LEARNS_UP_TO or not before or end.bounds[0] <= max(map(top1_of, before)):
        return []
    recipe, best = end.settings.recipe, max(before, key=top1_of)
    size = recipe.final_image_size
    larger = "" if size >= SMALL_IMAGES or recipe.data_dir in BUILT_IN else (
        f" Larger images may show more: --image_size={2 * size}.")
    return [f"Validation was still rising, from {top1_of(best):.1%} at epoch {best['epoch']:g} to {end.top1:.1%}, and "
            f"training is at {end.train_top1:.1%}. {_longer(end, 2)}{larger}"]


def _over_fitted(end: Ending) -> list[str]:
    if end.train_top1 <= LEARNS_UP_TO and end.rows[-1]["epoch"] < VISITS:
        return []
    if end.train_top1 - end.top1 < GAP or end.train_top1 <= end.bounds[1]:
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
    if end.is_guessing or len(end.classes) < 3 or wrong.total() < ERRORS or count < CONFUSED * wrong.total():
        return []
    return [f"{count} of {wrong.total()} errors are {end.classes[label]} taken for {end.classes[other]}. The worst "
            "errors, in report.html, show whether their labels are right."]


def _few_to_judge(end: Ending) -> list[str]:
    low, high = end.bounds
    if high - low < WIDE:
        return []
    images = "image tells" if end.samples == 1 else "images tell"
    return [f"{end.samples} validation {images} little: top-1 is between {low:.0%} and {high:.0%}. Set "
            "more of them aside (`data.prepare --validation_fraction`)."]
