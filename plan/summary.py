"""A plan in words: for a person at a terminal, and what in it can hardly be meant."""
from plan.plan import Plan
from plan.recipes import SMALL, SPAN_GIVES_WAY
from plan.settings import Settings

TRAINED_NETWORK = "--model=keras:MobileNetV3Small --pretrained"


def summary(settings: Settings, plan: Plan) -> list[str]:
    """Returns a plan in a few lines, for a person."""
    recipe, first = settings.recipe, plan.phases[0]
    sizes = ", ".join(map(str, recipe.image_size.values))
    lines = [f"model:         {recipe.model} at {sizes} pixels, {recipe.precision}",
             f"data:          {plan.train_samples:,} training images of {recipe.data_dir}",
             f"training:      {plan.epochs:g} epochs, {plan.steps:,} updates with {recipe.optimizer}",
             f"learning rate: {plan.as_json()['peak_learning_rate']:g} at most, {recipe.lr_schedule}, "
             f"warm-up of {recipe.warmup_epochs if recipe.warmup != 'none' else 0:g} epochs",
             f"workers:       {plan.workers}, each with {first.global_batch_size / first.workers:g} images per update",
             f"exchange:      {plan.allreduce.allreduce}"]
    for phase in plan.phases:
        lines.append(f"from epoch {phase.start_epoch:g}:".ljust(15) + f"batch {phase.global_batch_size:,} = "
                     f"{phase.workers} workers x micro-batch {phase.micro_batch_size} x {phase.accumulation_steps}, "
                     f"{phase.steps:,} updates")
    return [*lines, *doubts(settings, plan), "time:          `python -m launch.scaling` forecasts a cluster's"]


def doubts(settings: Settings, plan: Plan) -> list[str]:
    """Returns a line about each setting that can hardly be meant, or does less than it says."""
    recipe, launch = settings.recipe, settings.launch
    lines = []
    ties = ties_to_workers(settings)
    if launch.deterministic == "true" and ties:
        lines.append(f"--deterministic: with {' and '.join(ties)}, the same bits need the same number of workers")
    elif launch.deterministic == "true" and not launch.micro_batch_size:
        sizes = ", ".join(str(size) for size in dict.fromkeys(phase.micro_batch_size for phase in plan.phases))
        lines.append("--deterministic: on another number of workers, the same bits need the same "
                     f"--micro_batch_size, which is {sizes} here")
    model_is_chosen = settings.origins.get("model") == "command line"
    if settings.source == SMALL and not model_is_chosen and not settings.has_initial_weights:
        lines.append(f"few images: a network that knows ImageNet reaches more, with {TRAINED_NETWORK}")
    if SPAN_GIVES_WAY in settings.fitted:
        lines.append("--batch_norm_span: that of the recipe does not divide --batch_size or --micro_batch_size; batch "
                     "norm covers a micro-batch, which depends on the number of workers")
    batch = max(phase.global_batch_size for phase in plan.phases)
    if batch > plan.train_samples:
        lines.append(f"--batch_size={batch} is larger than the training set: each update reads its "
                     f"{plan.train_samples} images more than once")
    if recipe.warmup != "none" and recipe.warmup_epochs >= plan.epochs:
        lines.append(f"--warmup_epochs={recipe.warmup_epochs:g} is the whole training: its --epochs={plan.epochs:g} "
                     "end before the learning rate is reached")
    return lines


def ties_to_workers(settings: Settings) -> list[str]:
    """Returns the flags with which the bits of --deterministic need the same number of workers."""
    ties = {"--deterministic=same_workers": settings.launch.deterministic == "same_workers",
            "--compression=fp16": settings.launch.compression == "fp16",
            "--order=file": settings.recipe.order == "file"}
    return [flag for flag, is_set in ties.items() if is_set]
