"""Remarks on a plan: settings that are probably a mistake, have less effect than expected, or a better alternative.

train.py prints them when it starts, and --dry_run prints them with the plan. A sweep prints those on schedules.
"""
import bisect
import math

import model_zoo
from common.errors import UserError
from data.augmentation import AUGMENTATIONS
from optim import with_option
from optim.schedules import SCALINGS, Piecewise
from plan import grids
from plan.allreduce import MOST_WORKERS
from plan.plan import Plan, divisors, make_plan, tidy
from plan.recipes import LARGE_SAMPLES, SMALL, SPAN_OF_MICRO_BATCH, fitted, read
from plan.settings import Settings

TRAINED_NETWORK = "--model=keras:MobileNetV3Small --pretrained"
RATE = ("learning_rate", "lr_scaling", "base_batch_size", "trust_coefficient")
# A change of one of these needs another rate.
WITH_RATE = ("model", "pretrained", "pretrained_weights", "freeze", "optimizer", "loss", "momentum", "lars_clip")
PHASED = ("learning_rate", "batch_size", "batch_norm_span", "image_size")  # flags that take epoch:value pairs
SMALL_MICRO_BATCH = 16  # samples: smaller ones, one after another, leave most of a GPU idle
MOST_NEIGHBOURS = 8  # workers that share batch norm's statistics: the GPUs of a node
LARGE_RING = 256  # workers, from which the forecast of docs/allreduce.md has 92 % efficiency with a torus, a ring 66 %


def remarks(settings: Settings, plan: Plan, workers_per_node: int = 1) -> list[str]:
    """Returns a line for each remark."""
    recipe, launch, exchange = settings.recipe, settings.launch, plan.allreduce
    lines = []
    if (caveat := read(settings.source.file).get("Caveat")) and keeps(settings, *RATE):
        lines.append(f"{settings.source.file.stem}: {caveat}")
    if exchange.is_fallback:
        lines.append(f"--allreduce={launch.allreduce} continues with a {exchange.allreduce}: {exchange.why}")
    if plan.reads_by_file:
        what = "batches, and the pairs of --mixup and --cutmix," if recipe.mixup or recipe.cutmix else "batches"
        lines.append(f"--order=file: the order within a file is fixed, and {what} depend on the number of workers")
    ties = ties_to_workers(settings)
    if launch.deterministic == "true" and ties:
        lines.append(f"--deterministic: with {' and '.join(ties)}, the same bits need the same number of workers")
    elif launch.deterministic == "true" and not launch.micro_batch_size:
        sizes = {phase.micro_batch_size for phase in plan.phases}
        which = f"the same --micro_batch_size, which is {sizes.pop()} here" if len(sizes) == 1 else (
            "a --micro_batch_size, given to each run")
        lines.append(f"--deterministic: on another number of workers, the same bits need {which}")
    lines += [*on_few_images(settings), *on_unfitted(settings, plan), *on_little_effect(settings),
              *on_expected(settings, plan)]
    if SPAN_OF_MICRO_BATCH in settings.source.fitted:
        varies = "" if launch.micro_batch_size else ", which depends on the number of workers"
        lines.append("--batch_norm_span: that of the recipe does not divide --batch_size or --micro_batch_size; batch "
                     f"norm covers a micro-batch{varies}")
    batch = max(phase.global_batch_size for phase in plan.phases)
    if batch > plan.train_samples:
        lines.append(f"--batch_size={batch} is larger than the training set: an update reads some of its "
                     f"{plan.train_samples} images more than once")
    return [*lines, *on_schedules(settings), *on_workers(settings, plan, workers_per_node),
            *on_ring(plan, workers_per_node)]


def on_little_effect(settings: Settings) -> list[str]:
    """Returns a line for each flag that does less with the others than its name says."""
    recipe, lines = settings.recipe, []
    if recipe.freeze and not settings.has_initial_weights and recipe.model in model_zoo.MODELS:
        lines.append("--freeze: the layers that are not trained keep random weights; start from trained ones with "
                     "--init_checkpoint, --pretrained or --pretrained_weights")
    is_mixed = recipe.mixup or recipe.cutmix or recipe.rand_augment
    if recipe.repeats > 1 and not (is_mixed or AUGMENTATIONS[recipe.augmentation].random):
        lines.append(f"--repeats={recipe.repeats}: --augmentation={recipe.augmentation} is not random, so an epoch "
                     f"takes the same pixels {recipe.repeats} times; add --rand_augment or choose another "
                     "--augmentation")
    if settings.run.log_trust_ratios and recipe.optimizer not in with_option("trust_coefficient"):
        lines.append(f"--log_trust_ratios: {recipe.optimizer} has no trust ratios that could be recorded; norms of "
                     "weights and gradients are")
    return lines


def on_expected(settings: Settings, plan: Plan) -> list[str]:
    """Returns a line for each part of --expect or of the training that is not compared with the other."""
    curve = settings.run.expect
    if not curve:
        return []
    epochs = [interval.epoch for interval in plan.intervals() if interval.evaluates]
    compared = [epoch for epoch in epochs if curve.top1_at(epoch) is not None]
    lines = ["its last line is half-written and was left out"] if curve.is_cut else []
    if not compared:
        (first, _), (last, _) = curve.points[0], curve.points[-1]
        lines.append(f"no evaluation is compared, because the curve goes from epoch {first:g} to {last:g}, and "
                     f"evaluations follow epochs {epochs[0]:g} to {epochs[-1]:g}")
    elif compared[-1] < epochs[-1]:
        lines.append(f"evaluations after epoch {compared[-1]:g} are not compared, because the curve ends at epoch "
                     f"{curve.points[-1][0]:g}")
    return [f"--expect={curve.path}: {line}" for line in lines]


def on_ring(plan: Plan, workers_per_node: int) -> list[str]:
    """Returns a line if so many workers form a ring that its latency limits training, and a torus is possible."""
    workers = plan.workers
    if plan.allreduce.allreduce != "ring" or not LARGE_RING <= workers <= MOST_WORKERS:
        return []
    horizontal, vertical = grids.choose(workers, workers_per_node)
    if vertical == 1:
        return []
    return [f"--allreduce=ring: each exchange of {workers:,} workers is {2 * (workers - 1):,} messages, one after "
            f"another, and {2 * (horizontal + vertical - 2):,} with --allreduce=torus; for ResNet-50 on 1,024 V100, "
            "`python -m launch.scaling` forecasts 33% efficiency with a ring and 85% with a torus"]


def on_few_images(settings: Settings) -> list[str]:
    """Returns a line if the default recipe for few images is read, which a pretrained network would surpass.

    No line if the command line has a learning rate, optimizer or model: the pretrained network needs others.
    """
    chosen = any(map(settings.is_given, ("model", "optimizer", "learning_rate")))
    if not settings.source.is_default or settings.source.file != SMALL or chosen or settings.has_initial_weights:
        return []
    return [f"less than {LARGE_SAMPLES:,} images: a network that knows ImageNet usually reaches more, with "
            f"{TRAINED_NETWORK}"]


def has_length(settings: Settings) -> bool:
    """Whether the recipe sets epochs and batch size. small_images.flags does so only as the default recipe."""
    return settings.source.is_default or settings.source.file.resolve() != SMALL.resolve()


def keeps(settings: Settings, *names: str) -> bool:
    """Whether these flags have the recipe's values."""
    return all(getattr(settings.recipe, name) == getattr(settings.source.recipe, name) for name in names)


def on_unfitted(settings: Settings, plan: Plan) -> list[str]:
    """Returns a line if --flagfile=small_images was given, which only as the default is fitted to the dataset."""
    samples, epochs = plan.train_samples, settings.recipe.epochs if "epochs" in settings.source.origins else None
    if has_length(settings) or samples >= LARGE_SAMPLES:
        return []
    fits = [flag for flag in fitted(samples, epochs, settings.has_initial_weights)
            if flag[2:].partition("=")[0] not in settings.source.origins]
    return [f"--flagfile={SMALL.stem} leaves some flags at train.py's defaults; without a recipe, --data_dir=FOLDER "
            f"fits them to the number of images: {' '.join(fits)}"] if fits else []


def ties_to_workers(settings: Settings) -> list[str]:
    """Returns the flags with which --deterministic gives the same bits on the same number of workers alone."""
    ties = {"--deterministic=same_workers": settings.launch.deterministic == "same_workers",
            "--compression=fp16": settings.launch.compression == "fp16",
            "--order=file": settings.recipe.order == "file"}
    return [flag for flag, is_set in ties.items() if is_set]


def on_schedules(settings: Settings) -> list[str]:
    """Returns a line if the epochs are too few for the schedule, and one if the rate is not scaled with the batch."""
    recipe, lines = settings.recipe, []
    if broken := _broken(recipe):
        kept = kept_shares(settings)
        lines.append(f"--epochs={recipe.epochs:g}: {' and '.join(broken)}{kept and f'; {kept}'}")
    now, before = (one.batch_size.values[0] for one in (recipe, settings.source.recipe))
    is_its_rate = has_length(settings) and keeps(settings, *RATE, *WITH_RATE) and not settings.is_given("learning_rate")
    if now != before and is_its_rate and recipe.lr_scaling == "none" and recipe.momentum_schedule == "constant":
        first, other = ("sqrt", "linear") if recipe.optimizer == "muon" else ("linear", "sqrt")  # large_batches.md
        by, others = (f"{SCALINGS[name](now / before):.3g}" for name in (first, other))
        lines.append(f"--batch_size={now}: the learning rate is still that for the recipe's {before}; "
                     f"--lr_scaling={first} --base_batch_size={before} would multiply it by {by}, {other} by {others}")
    return lines


def _broken(recipe) -> list[str]:
    """Returns what is wrong with the schedule of a recipe."""
    found = []
    if recipe.warmup != "none" and recipe.warmup_epochs >= recipe.epochs / 2:
        found.append(f"warm-up covers {min(1, recipe.warmup_epochs / recipe.epochs):.0%} of the training")
    boundaries = recipe.lr_boundaries if recipe.lr_schedule == "multistep" else (0,)
    for name, last in (("lr_boundaries", boundaries[-1]), ("learning_rate", recipe.learning_rate.boundaries[-1])):
        if last >= recipe.epochs:
            found.append(f"no update follows epoch {last:g} of --{name}")
    return found


def kept_shares(settings: Settings) -> str:
    """Returns the flags that scale warm-up, boundaries and phases with the epochs, in words, or an empty string."""
    recipe, original = settings.recipe, settings.source.recipe

    def scaled(epoch):
        return tidy(float(f"{epoch * recipe.epochs / original.epochs:.4g}"))

    kept = {}
    if original.warmup != "none":
        kept["warmup_epochs"] = scaled(original.warmup_epochs)
    if original.lr_schedule == recipe.lr_schedule == "multistep":
        kept["lr_boundaries"] = tuple(map(scaled, original.lr_boundaries))
    for name in PHASED:
        phases = getattr(original, name)
        if phases and len(phases.pairs) > 1 and not settings.is_given(name):
            kept[name] = Piecewise(tuple((scaled(epoch), value) for epoch, value in phases.pairs))
    flags = [f"--{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
             for name, value in kept.items() if value != getattr(recipe, name)]
    return f"keep the recipe's shares with {' '.join(flags)}" if flags else ""


def on_workers(settings: Settings, plan: Plan, workers_per_node: int) -> list[str]:
    """Returns a line if micro-batches are tiny, or if too many workers share batch norm's statistics.

    The line names the nearest smaller and larger number of workers, on whole nodes, without these problems.
    """
    launch, problems = settings.launch, _problems(plan)
    if not problems or launch.micro_batch_size or launch.elastic or launch.workers_schedule:
        return []
    numbers = [number for number in divisors(math.gcd(*settings.recipe.batch_size.values))
               if number % workers_per_node == 0]
    index = bisect.bisect(numbers, plan.workers)
    nearest = [next((number for number in side if _fits(settings, plan, number)), None)
               for side in (reversed(numbers[:index]), numbers[index:])]
    where = " or ".join(f"{number:,}" for number in nearest if number)
    cure = f"{where} workers do better" if where else "another --batch_size may do better"
    return [f"{plan.workers:,} worker{'s' * (plan.workers > 1)}: {' and '.join(problems)}; {cure}"]


def _problems(plan) -> list[str]:
    """Returns what is inefficient about micro-batches and batch norm, in words."""
    found = []
    if any(phase.accumulation_steps > 1 and phase.micro_batch_size < SMALL_MICRO_BATCH for phase in plan.phases):
        sizes, steps = zip(*((phase.micro_batch_size, phase.accumulation_steps) for phase in plan.phases), strict=True)
        found.append(f"micro-batches of size {', '.join(map(str, sizes))} with "
                     f"{' to '.join(map(str, dict.fromkeys((min(steps), max(steps)))))} accumulation steps")
    if (most := max(phase.neighbours for phase in plan.phases)) > MOST_NEIGHBOURS:
        found.append(f"batch norm synchronized over {most} workers")
    return found


def _fits(settings, plan, workers) -> bool:
    """Whether the recipe has a plan without problems on so many workers."""
    try:
        return not _problems(make_plan(settings.recipe, None, workers, plan.train_samples))
    except UserError:
        return False
