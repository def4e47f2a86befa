"""Advice at the end of a training: how certain its top-1 is, why it is not higher, and what to try."""
import math
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common import metric
from common.run_folder import FLAGS, top1_of
from data.synthetic import is_synthetic
from optim import OPTIMIZERS, with_option
from optim.schedules import scaled
from plan.plan import Plan
from plan.remarks import RATE, TRAINED_NETWORK, WITH_RATE, has_length, keeps, on_few_images
from plan.settings import Settings
from training.divergence import Diverged

QUANTILE = 1.959964  # of the normal distribution, two-sided 95 %
LEARNED = 0.1  # top-1 that training gains on guessing if it has learned anything
GAP = 0.2  # of training's top-1 over validation's, from which a network overfits
LEARNS_UP_TO = 0.9  # training's top-1, up to which a network does not yet fit its training images
GOOD = 0.95  # top-1 from which there is nothing to mend
FEW_UPDATES = 300  # below which a larger batch than the recipe's leaves few
OTHER_RATE = 3  # factor to the recipe's learning rate, from which it is worth a sentence
EXPLODED = 3  # times the loss of guessing: a validation loss that the learning rate has driven up
WIDE = 0.2  # width of the confidence interval of top-1 from which there are too few validation images
CONFUSED, ERRORS = 0.25, 20  # share of the errors that one pair of classes has, of at least so many


def interval(accuracy: float, samples: int) -> tuple[float, float]:
    """Returns Wilson's 95 % confidence interval, from 0 to 1, of an accuracy that was measured on so many samples."""
    square = QUANTILE**2 / samples
    centre = accuracy + square / 2
    half = QUANTILE * math.sqrt(accuracy * (1 - accuracy) / samples + square / (4 * samples))
    low, high = (centre - half) / (1 + square), (centre + half) / (1 + square)
    return max(0.0, min(low, accuracy)), min(1.0, max(high, accuracy))  # rounding may leave the accuracy outside


def is_guessing(accuracy: float, samples: int, guess: float) -> bool:
    """Whether an accuracy is not certainly above that of always naming the most frequent class, `guess`.

    It is not if all samples are of one class, as in a folder of test images of a single one.
    """
    return interval(accuracy, samples)[0] <= guess < 1


@dataclass(frozen=True)
class Ending:
    """What is known at the end of a training."""

    settings: Settings
    plan: Plan
    rows: list[dict]  # of metrics.jsonl
    summary: dict  # content of summary.json
    classes: tuple[str, ...]  # their names
    outcomes: np.ndarray  # of the last evaluation, as in training.evaluate.EvaluationResult
    folder: Path = Path("RUN")  # of the run

    @property
    def top1(self) -> float:
        return top1_of(self.summary)

    @property
    def train_top1(self) -> float:
        return self.rows[-1][metric.TRAIN_TOP1]

    @property
    def is_mixed(self) -> bool:
        """Whether training images are so altered that top-1 in training says little."""
        recipe = self.settings.recipe
        return bool(recipe.mixup or recipe.cutmix or recipe.rand_augment)

    @property
    def has_room(self) -> bool:
        """Whether top-1 in training can still rise. False if it says little."""
        return not self.is_mixed and self.train_top1 <= LEARNS_UP_TO

    @property
    def samples(self) -> int:
        """Number of validation images."""
        return self.summary[metric.VAL_SAMPLES]

    @property
    def bounds(self) -> tuple[float, float]:
        return interval(self.top1, self.samples)

    @property
    def guess(self) -> float:
        """Top-1 of always naming the most frequent class."""
        return self.summary[metric.VAL_GUESS_COUNT] / self.samples

    @property
    def is_guessing(self) -> bool:
        return is_guessing(self.top1, self.samples, self.guess)


def advice(end: Ending) -> list[str]:
    """Returns sentences in plain text: why a result is no better, and the flags to try."""
    whole = [row for row in end.rows
             if None not in (row.get(metric.TRAIN_TOP1), row.get(metric.VAL_TOP1), _judged_loss(row))]
    is_reached = end.summary.get("epochs_to_target") is not None
    if not whole or is_reached or is_synthetic(end.settings.recipe.data_dir):
        return []
    end = replace(end, rows=whole)
    found = [_go_on(end)] if end.settings.recipe.freeze else [] if end.top1 >= GOOD else (
        _other_rate(end) or _too_short(end) or _unsteady(end) or _not_learned(end) or _overfitted(end)
        or [*map(as_sentence, on_few_images(end.settings))])
    run = end.settings.run
    if run.output_dir and run.resume == "auto" and not end.settings.recipe.freeze:
        found = [f"{said} Other flags need another --output_dir." if "--" in said else said for said in found]
    return [*found, *_confused(end), *_few_to_judge(end)]


def _go_on(end: Ending) -> str:
    """Names the second training after one with --freeze."""
    command = shlex.join(["uv", "run", "train.py", f"--data_dir={end.settings.recipe.data_dir}",
                          f"--init_checkpoint={end.folder}/checkpoints/best", f"--output_dir={end.folder}-whole"])
    return f"Only the last layer was trained. To train all layers from here, run `{command}`."


def as_sentence(line: str) -> str:
    """Returns a line of the terminal as a sentence."""
    return f"{line[0].upper()}{line[1:]}."


def times_recipe(settings: Settings) -> float | None:
    """Returns the learning rate as a multiple of the recipe's, or None if they are not comparable.

    Rates are the largest after scaling, without warm-up and decay, which depend on the epochs, and for LARS times the
    trust coefficient. Another network, optimizer or batch size needs a rate of its own. The flags of an earlier run
    tell no recipe's.
    """
    recipe, original = settings.recipe, settings.source.recipe
    if not keeps(settings, "batch_size", *WITH_RATE) or settings.is_given("init_checkpoint") or (
            settings.source.file.name == FLAGS):
        return None
    ours, theirs = (
        max(scaled(one.learning_rate, one.lr_scaling, one.base_batch_size, one.batch_size.values[0]).values)
        * (one.trust_coefficient if one.optimizer in with_option("trust_coefficient") else 1)
        for one in (recipe, original))
    return ours / theirs if theirs else None


def on_rate(settings: Settings, least: float = 0.0) -> str:
    """Returns a line if the learning rate is far from the recipe's, and at least so many times as high."""
    times = times_recipe(settings)
    if times is None or times < least or 1 / OTHER_RATE < times < OTHER_RATE:
        return ""
    given = " and ".join(f"--{name}" for name in RATE if settings.is_given(name))
    return f"with {given}, the learning rate is {float(f'{times:.3g}'):g} times the recipe's"


def after_divergence(problem: Diverged, settings: Settings) -> str:
    """Returns what to try after a divergence."""
    return "; ".join(filter(None, [problem.advice, problem.is_of_samples and on_rate(settings, OTHER_RATE)]))


def _other_rate(end: Ending) -> list[str]:
    line = on_rate(end.settings)
    return [as_sentence(line)] if line and (end.has_room or end.is_guessing) else []


def _too_short(end: Ending) -> list[str]:
    """The command line has shortened the recipe, so that training from scratch has far to go."""
    recipe, original = end.settings.recipe, end.settings.source.recipe
    if not end.has_room or end.settings.has_initial_weights or not has_length(end.settings):
        return []
    if recipe.epochs <= original.epochs / 2:
        return [f"Leave out --epochs={recipe.epochs:g}: the recipe has {original.epochs:g}."]
    if end.plan.steps >= FEW_UPDATES or min(recipe.batch_size.values) < 2 * max(original.batch_size.values):
        return []
    return [f"{end.plan.steps} updates are few: with the recipe's --batch_size, there are more."]


def _unsteady(end: Ending) -> list[str]:
    """The validation loss was far above that of guessing, with which a training starts.

    Errors of which a network is sure also raise it, but top-1 does not fall then.
    """
    worst = max(end.rows[len(end.rows) // 2:], key=_judged_loss)
    highest, guessing = _judged_loss(worst), math.log(len(end.classes))
    has_fallen = top1_of(worst) < interval(max(map(top1_of, end.rows)), end.samples)[0]
    never_rose = end.is_guessing and end.has_room
    if highest <= EXPLODED * guessing or not (has_fallen or never_rose):
        return []
    return [f"Validation loss was as high as {highest:.4g} in the second half, where guessing has {guessing:.2g}. "
            "A third of the learning rate may be steadier."]


def _judged_loss(row: dict) -> float | None:
    return row.get(metric.EMA_VAL_LOSS, row.get(metric.VAL_LOSS))


def _not_learned(end: Ending) -> list[str]:
    if not end.is_guessing or not end.has_room or end.train_top1 >= end.guess + LEARNED:
        return []
    return [f"The network has not begun to learn: its top-1 in training is {end.train_top1:.1%}, too. "
            f"{_to_begin_to_learn(end.settings)}"]


def _to_begin_to_learn(settings: Settings) -> str:
    """A sweep is only proposed where a rate of it is not called far from the recipe's."""
    recipe, original = settings.recipe, settings.source.recipe
    rates = recipe.learning_rate.values
    if recipe.optimizer != original.optimizer and not settings.is_given("learning_rate"):
        return (f"The learning rate is that for the recipe's {original.optimizer}: give --learning_rate for "
                f"{recipe.optimizer}, such as {OPTIMIZERS[recipe.optimizer].rate:g}.")
    if times_recipe(settings) is None and len(rates) == 1:
        tried = ",".join(f"{factor * rates[0]:g}" for factor in (0.1, 1, 10))
        return (f"Compare learning rates: `python -m experiments.sweep --sweep=learning_rate={tried}` with the same "
                "flags.")
    return "Look at the images in report.html: can the classes be told apart, and are the labels right?"


def _overfitted(end: Ending) -> list[str]:
    """An average of the weights may lag behind, so the better of the two is compared."""
    validation = max(end.top1, end.summary[metric.VAL_TOP1])
    if end.is_mixed or end.has_room or end.is_guessing:
        return []
    if end.train_top1 - validation < GAP or end.train_top1 <= interval(validation, end.samples)[1]:
        return []
    return [f"Top-1 is {end.train_top1:.1%} in training and {validation:.1%} in validation: the network overfits its "
            f"{end.plan.train_samples:,} training images. {_for_few_images(end)}"]


def _for_few_images(end: Ending) -> str:
    if on_few_images(end.settings):
        return f"A network that knows ImageNet needs fewer images: {TRAINED_NETWORK}."
    if any(phase.micro_batch_size % 2 for phase in end.plan.phases):  # mixup needs pairs
        return "More images help."
    return "More images help. Mixing them may, too: --mixup=0.2."


def _confused(end: Ending) -> list[str]:
    labels, predicted = end.outcomes[:, :2].astype(int).T
    wrong = Counter(pair for pair in zip(labels.tolist(), predicted.tolist(), strict=True) if pair[0] != pair[1])
    [((label, other), count)] = wrong.most_common(1) or [((0, 0), 0)]
    if end.is_guessing or len(end.classes) < 3 or wrong.total() < ERRORS or count < CONFUSED * wrong.total():
        return []
    return [f"{count} of {wrong.total()} errors are {end.classes[label]} taken for {end.classes[other]}. report.html "
            "shows the errors with the highest losses: are their labels right?"]


def _few_to_judge(end: Ending) -> list[str]:
    low, high = end.bounds
    if high - low < WIDE:
        return []
    images = "image tells" if end.samples == 1 else "images tell"
    return [f"{end.samples} validation {images} little: the 95% interval of top-1 is {low:.0%} to {high:.0%}."]
