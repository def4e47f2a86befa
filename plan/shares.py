"""What warm-up, boundaries and phases are when another number of epochs keeps their shares of the training."""
from dataclasses import replace

from optim.schedules import Piecewise
from plan.plan import tidy
from plan.settings import Recipe, Settings

PHASED = ("learning_rate", "batch_size", "batch_norm_span", "image_size")  # flags that take epoch:value pairs


def kept_shares(settings: Settings) -> tuple[Recipe, tuple[str, ...]]:
    """Returns the recipe with the shares that it has without the command line, and the flags that make it so.

    Phases on the command line stay.
    """
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
    changed = {name: value for name, value in kept.items() if value != getattr(recipe, name)}
    return replace(recipe, **changed), tuple(
        f"--{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in changed.items())
