"""The command line: reads the flags that settings.py declares. Imports nothing heavy: a wrong flag fails at once."""
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags as absl_flags

import model_zoo
from common import flags
from common.errors import UsageError, UserError
from data import named
from distributed.launcher import ELASTIC
from training.settings import Launch, Recipe, Run, Settings

DEFAULT_RECIPE = Path(__file__).parents[1] / "launch" / "recipes" / "digits.flags"
GROUPS = {"Recipe": Recipe, "Launch": Launch, "Run": Run}


def parse(argv: Sequence[str]) -> Settings:
    """The settings of a command line, argv[0] being the program. Raises UsageError, UserError.

    A recipe is read first and the flags given come after it: the one that --flagfile names, the evaluated run's
    flags.txt, or, with neither, the digits recipe.
    """
    values = _read(argv)
    for name in ("workers", "workers_per_node"):
        if values[name].value is not None and not values.dry_run:
            raise UsageError(f"--{name} plans for workers that need not exist: it goes with --dry_run")
    if values.elastic != (ELASTIC in os.environ):
        raise UsageError("--elastic goes with horovodrun --min-np=N --max-np=N --host-discovery-script=SCRIPT"
                         if values.elastic else "horovodrun was told that workers may come and go: add --elastic")
    if values.mode == "evaluate" and not values.checkpoint:
        raise UsageError("--mode=evaluate needs --checkpoint=RUN/checkpoints")
    recorded = [name for name in (*flags.names(Recipe), *flags.names(Launch)) if values[name].value not in (None, [])]
    text = "\n".join(values[name].serialize() for name in recorded) + "\n"
    recipe, launch, run = (flags.parsed(values, group) for group in GROUPS.values())
    recipe = with_image_size(recipe)
    given = {name: values[name].value for group in GROUPS.values() for name in flags.names(group)}
    return Settings(recipe, launch, run, given | {"image_size": recipe.image_size}, text)


def with_image_size(recipe: Recipe) -> Recipe:
    """With the size that the model is meant for, unless there is one."""
    size = recipe.image_size or model_zoo.MODELS[recipe.model].image_size
    return dataclasses.replace(recipe, image_size=size)


def define() -> absl_flags.FlagValues:
    """All flags, with their defaults."""
    return flags.define(*GROUPS.values())


def help_text() -> str:
    values, lines = define(), ["train.py: trains, evaluates and reports; see README.md.", ""]
    for title, group in GROUPS.items():
        lines += [f"{title} flags:", *flags.described(values, flags.names(group)), ""]
    lines.append("--flagfile=FILE reads flags from a file; without it launch/recipes/digits.flags is read first.")
    return "\n".join(lines)


def _read(argv):
    recipes, given = recipes_first(argv[1:])
    values = flags.read(define(), [argv[0], *(recipes or [f"--flagfile={DEFAULT_RECIPE}"]), *given])
    if values.mode == "evaluate" and values.checkpoint and not recipes:
        recorded = run_folder(values.checkpoint) / "flags.txt"
        if not recorded.is_file():
            raise UserError(f"--checkpoint: {values.checkpoint} lies in no run's folder, there is no {recorded}; give "
                            "RUN/checkpoints, or the recipe by --flagfile")
        values = flags.read(define(), [argv[0], f"--flagfile={recorded}", *given])
    values.data_dir = named.absolute(values.data_dir)  # a run's flags.txt has to mean the same elsewhere
    return values


def recipes_first(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the --flagfile arguments, the rest): a flag that is given wins over a recipe, wherever it stands."""
    recipes, rest, arguments = [], [], list(arguments)
    while arguments:
        argument = arguments.pop(0)
        if argument in ("--flagfile", "-flagfile") and arguments:
            recipes.append(f"--flagfile={arguments.pop(0)}")
        else:
            (recipes if argument.startswith(("--flagfile=", "-flagfile=")) else rest).append(argument)
    return recipes, rest


def run_folder(checkpoint: str) -> Path:
    """The run that a --checkpoint belongs to: RUN itself, RUN/checkpoints, or one checkpoint inside."""
    path = Path(checkpoint).absolute()
    if (path / "checkpoints").is_dir():
        return path
    return path.parent if path.name == "checkpoints" else path.parent.parent
