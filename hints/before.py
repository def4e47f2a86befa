"""Hints before a training: on its recipe, its plan and workers, and its images."""
from collections.abc import Mapping

import model_zoo
from common.flags import names
from common.run_folder import FLAGS
from data.augmentation import AUGMENTATIONS
from hints.hint import RATE, WITH_RATE, Hint, has_length, keeps
from optim import OPTIMIZERS
from optim.schedules import SCALINGS
from plan import grids
from plan.allreduce import MOST_WORKERS
from plan.plan import Plan
from plan.recipes import LARGE, read
from plan.settings import Recipe, Settings
from plan.shares import kept_shares

LARGE_RING = 256  # workers, from which the forecast of docs/allreduce.md has 92 % efficiency with a torus, a ring 66 %
UNEVEN = 4  # times as many images in one class as in another, above which --class_weights is mentioned
ENLARGED = 3  # times the size of an image, from which training on it is mentioned
TINY = 48  # pixels up to which the CIFAR networks of the zoo suit an image


def on_recipe(settings: Settings) -> list[Hint]:
    """Returns what can be said without the dataset and the workers. A recipe as it is draws none."""
    return [*_on_frozen_layers(settings), *_on_repeats(settings), *_on_optimizer(settings), *_on_shares(settings),
            *_on_batch_size(settings)]


def on_plan(settings: Settings, plan: Plan, workers_per_node: int = 1) -> list[Hint]:
    """Returns `on_recipe`, the recipe's own caveat, and what can be said of a number of workers."""
    caveat = read(settings.source.file).get("Caveat")
    own = [Hint("caveat", f"{settings.source.file.stem}: {caveat}")] if caveat and keeps(settings, *RATE) else []
    return [*own, *on_recipe(settings), *_on_expected(settings, plan), *_on_exchange(plan, workers_per_node)]


def on_images(settings: Settings, counts: Mapping[str, int], side: int = 0,
              is_on_cpu: bool = False) -> list[Hint]:
    """Returns what the training images show.

    There is nothing to say of a resumed run, which cannot be changed, and of a recipe that was named and is run as is.

    counts: number of training images of each class; empty if it is not known. side: typical shorter side of a training
    image in pixels; 0 if it is not known. is_on_cpu: whether this machine trains, without a GPU.
    """
    recipe, source = settings.recipe, settings.source
    is_changed = any(settings.is_given(name) for name in names(Recipe) if name not in ("data_dir", "seed"))
    if source.file.name == FLAGS or not (source.is_default or is_changed):
        return []
    found, by_size = [], sorted((number, name) for name, number in counts.items() if number)
    if by_size and not recipe.class_weights and by_size[-1][0] > UNEVEN * by_size[0][0]:
        (few, small), *_, (many, large) = by_size
        found.append(Hint("note", f"{many} training images of {large!r} and {few} of {small!r}; each class has the "
                                  "same weight with", ("--class_weights=balanced",)))
    size, has_model = recipe.final_image_size, settings.is_given("model")
    if settings.has_initial_weights or settings.is_given("image_size"):
        pass
    elif 0 < ENLARGED * side <= size and (
            smaller := max(side, model_zoo.MODELS[recipe.model].least_image_size)) < size:
        network = () if has_model or side > TINY else ("--model=resnet20",)
        found.append(Hint("note", f"the training images have about {side} pixels, and --image_size={size} enlarges "
                                  f"them {size / side:.2g} times; a step takes much less time with",
                          (*network, f"--image_size={smaller}")))
    elif is_on_cpu and source.file == LARGE and not has_model:
        found.append(Hint("note", "without a GPU, it is faster with", ("--model=resnet10_narrow", "--image_size=64")))
    return found


def _on_optimizer(settings: Settings) -> list[Hint]:
    """Returns a hint if the optimizer is not the recipe's, but the learning rate is."""
    now, before = settings.recipe.optimizer, settings.source.recipe.optimizer
    rate = OPTIMIZERS[now].rate
    if rate == OPTIMIZERS[before].rate or settings.is_given("learning_rate"):
        return []
    return [Hint("warning", f"--optimizer={now}: the learning rate is still that for the recipe's {before}; try",
                 (f"--learning_rate={rate:g}", *_warmup_below(settings.recipe, rate)))]


def _warmup_below(recipe: Recipe, rate: float) -> tuple[str, ...]:
    """Returns the flag with which a warm-up does not start above a learning rate, if it would."""
    is_above = recipe.warmup == "gradual" and recipe.warmup_learning_rate > rate
    return (f"--warmup_learning_rate={rate / 10:g}",) if is_above else ()


def _on_frozen_layers(settings: Settings) -> list[Hint]:
    recipe = settings.recipe
    if not recipe.freeze or settings.has_initial_weights or recipe.model not in model_zoo.MODELS:
        return []
    return [Hint("warning", "--freeze: the layers that are not trained keep random weights; give trained ones "
                            "(--init_checkpoint, --pretrained or --pretrained_weights), or train all layers with",
                 ("--nofreeze",))]


def _on_repeats(settings: Settings) -> list[Hint]:
    recipe = settings.recipe
    if recipe.repeats == 1 or recipe.mixup or recipe.cutmix or recipe.rand_augment or (
            AUGMENTATIONS[recipe.augmentation].random):
        return []
    return [Hint("warning", f"--repeats={recipe.repeats}: --augmentation={recipe.augmentation} is not random, so an "
                            f"epoch takes the same pixels {recipe.repeats} times; add --rand_augment, or give",
                 ("--augmentation=crop",))]


def _on_shares(settings: Settings) -> list[Hint]:
    """Returns a hint if the epochs are too few for the recipe's warm-up, boundaries or rates."""
    kept, flags = kept_shares(settings)
    still = _broken(kept)
    if not (broken := [text for name, text in _broken(settings.recipe).items() if name not in still]):
        return []
    return [Hint("warning", f"--epochs={settings.recipe.epochs:g}: {' and '.join(broken)}; keep the recipe's shares "
                            "with", flags)]


def _broken(recipe: Recipe) -> dict[str, str]:
    """Returns the flags whose part of the schedule does not fit into the epochs, and how."""
    found = {}
    if recipe.warmup != "none" and recipe.warmup_epochs >= recipe.epochs / 2:
        share = min(1, recipe.warmup_epochs / recipe.epochs)
        found["warmup"] = f"warm-up covers {share:.0%} of the training"
    boundaries = recipe.lr_boundaries if recipe.lr_schedule == "multistep" else (0,)
    for name, last in (("lr_boundaries", boundaries[-1]), ("learning_rate", recipe.learning_rate.boundaries[-1])):
        if last >= recipe.epochs:
            found[name] = f"no update follows epoch {last:g} of --{name}"
    return found


def _on_batch_size(settings: Settings) -> list[Hint]:
    """Returns a hint if the batch size is not the recipe's, but the learning rate is."""
    recipe = settings.recipe
    now, before = (one.batch_size.values[0] for one in (recipe, settings.source.recipe))
    is_its_rate = has_length(settings) and keeps(settings, *RATE, *WITH_RATE) and not settings.is_given("learning_rate")
    if now == before or not is_its_rate or recipe.lr_scaling != "none" or recipe.momentum_schedule != "constant":
        return []
    rule = OPTIMIZERS[recipe.optimizer].scaling
    rate = min(recipe.learning_rate.values) * SCALINGS[rule](now / before)
    return [Hint("warning", f"--batch_size={now}: the learning rate is still that for the recipe's {before}; scale it "
                            "with", (f"--lr_scaling={rule}", f"--base_batch_size={before}",
                                     *_warmup_below(recipe, rate)))]


def _on_expected(settings: Settings, plan: Plan) -> list[Hint]:
    """Returns a hint if --expect does not have the epochs that are evaluated last."""
    if not (curve := settings.run.expect):
        return []
    epochs = [interval.epoch for interval in plan.intervals() if interval.evaluates]
    *compared, is_last = (curve.top1_at(epoch) is not None for epoch in epochs)
    return [] if is_last else [
        Hint("warning", f"--expect={curve.path} goes from epoch {curve.points[0][0]:g} to {curve.points[-1][0]:g}, so "
                        f"only {sum(compared)} of {len(epochs)} evaluations are compared with it")]


def _on_exchange(plan: Plan, workers_per_node: int) -> list[Hint]:
    """Returns a hint if the all-reduce is not the one that was asked for, or a ring that is too long."""
    exchange, workers = plan.allreduce, plan.workers
    if exchange.is_fallback:
        other = "--allreduce=ring" if exchange.allreduce == "ring" else "--torus_grid=auto"
        return [Hint("note", f"{exchange.why}; training goes on as with", (other,))]
    if exchange.allreduce != "ring" or not LARGE_RING <= workers <= MOST_WORKERS:
        return []
    horizontal, vertical = grids.choose(workers, workers_per_node)
    return [] if vertical == 1 else [
        Hint("note", f"--allreduce=ring: an exchange of {workers:,} workers takes {2 * (workers - 1):,} messages, one "
                     f"after another, and {2 * (horizontal + vertical - 2):,} with", ("--allreduce=torus",))]
