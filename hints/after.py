"""Hints after a training: why its top-1 is not higher, and what to try."""
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common import metric
from common.run_folder import FLAGS, top1_of
from data.synthetic import is_synthetic
from hints.hint import RATE, WITH_RATE, Hint, has_length, keeps
from optim import with_option
from optim.schedules import scaled
from plan.recipes import SMALL
from plan.settings import Settings

TRAINED_MODEL = "keras:MobileNetV3Small"
LEARNS_UP_TO = 0.9  # training's top-1, up to which a network does not yet fit its training images
GOOD = 0.95  # top-1 from which there is nothing to mend
OTHER_RATE = 3  # factor to the recipe's learning rate, from which it is worth a sentence


@dataclass(frozen=True)
class Ending:
    """How a training has ended."""

    settings: Settings
    rows: Sequence[dict]  # of metrics.jsonl
    summary: dict  # content of summary.json
    folder: str = "RUN"  # of the run
    can_pretrain: Callable[[], bool] = lambda: True  # whether the weights of TRAINED_MODEL can be had here

    @property
    def top1(self) -> float:
        """The best one."""
        return self.summary.get("best_top1", top1_of(self.summary))

    @property
    def when(self) -> str:
        """The epoch of the best top-1, in words, or an empty string if it is that of the last evaluation."""
        best, last = (self.summary.get(name) for name in ("best_epoch", "epochs"))
        return "" if self.top1 == top1_of(self.summary) else f", best at epoch {best:g} of {last:g}"

    @property
    def train_top1(self) -> float | None:
        return next((row[metric.TRAIN_TOP1] for row in reversed(self.rows)
                     if None not in (row.get(metric.TRAIN_TOP1), row.get(metric.VAL_LOSS))), None)

    @property
    def has_room(self) -> bool:
        """Whether top-1 in training can still rise. False if images are so altered that it says little."""
        recipe = self.settings.recipe
        return not (recipe.mixup or recipe.cutmix or recipe.rand_augment) and self.train_top1 <= LEARNS_UP_TO


def on_result(end: Ending) -> list[Hint]:
    """Returns at most one hint: the first that holds."""
    is_reached = end.summary.get("epochs_to_target") is not None
    if is_reached or end.train_top1 is None or is_synthetic(end.settings.recipe.data_dir):
        return []
    if end.settings.recipe.freeze:
        return [_on_the_other_layers(end)]
    if end.top1 >= GOOD:
        return []
    return (end.has_room and (on_rate(end.settings) or _on_length(end))) or _on_few_images(end)


def _on_the_other_layers(end: Ending) -> Hint:
    command = shlex.join(["uv", "run", "train.py", f"--data_dir={end.settings.recipe.data_dir}",
                          f"--init_checkpoint={end.folder}/checkpoints/best", f"--output_dir={end.folder}-whole"])
    return Hint("advice", f"only the last layer was trained; to train all layers from here, run `{command}`")


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


def on_rate(settings: Settings, least: float = 0.0) -> list[Hint]:
    """Returns a hint if the learning rate is far from the recipe's, and at least so many times as high."""
    times = times_recipe(settings)
    if times is None or times < least or 1 / OTHER_RATE < times < OTHER_RATE:
        return []
    flags = tuple(f"--{name}={getattr(settings.source.recipe, name)}" for name in RATE if settings.is_given(name))
    return [Hint("advice", f"the learning rate is {float(f'{times:.3g}'):g} times the recipe's, which has", flags)]


def _on_length(end: Ending) -> list[Hint]:
    """Returns a hint if the command line has shortened the recipe, so that training from scratch has far to go."""
    settings, now, before = end.settings, end.settings.recipe.epochs, end.settings.source.recipe.epochs
    is_its_network = not (settings.has_initial_weights or settings.is_given("model") or settings.is_given("image_size"))
    if not (is_its_network and has_length(settings) and now <= before / 2):
        return []
    return [Hint("advice", f"the recipe has more epochs than {now:g}; give", (f"--epochs={before:g}",))]


def _on_few_images(end: Ending) -> list[Hint]:
    """Returns a hint if the default recipe for few images does not suffice, which trains from scratch."""
    settings = end.settings
    is_own = settings.has_initial_weights or any(map(settings.is_given, ("model", "optimizer", "learning_rate")))
    if not settings.source.is_default or settings.source.file != SMALL or is_own or not end.can_pretrain():
        return []
    return [Hint("advice", f"top-1 is {end.train_top1:.1%} in training and {end.top1:.1%} in validation{end.when}; a "
                           "network that knows ImageNet needs fewer images:",
                 (f"--model={TRAINED_MODEL}", "--pretrained"))]
