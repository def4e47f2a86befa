"""The command line: reads the flags that settings.py declares. Imports nothing heavy, so a wrong flag fails at once."""
import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags as absl_flags

import model_zoo
from common import command, flags
from common.errors import UsageError, UserError
from common.recipe_file import recipe_path
from data import named
from distributed.launcher import ELASTIC
from optim.schedules import ENDING, Piecewise
from training.default_recipe import default_recipe
from training.settings import Launch, Recipe, Run, Settings

FIRST_SCREEN = {
    "Data and model": ("data_dir", "augmentation", "model", "image_size"),
    "Training": ("epochs", "batch_size", "optimizer", "learning_rate", "weight_decay", "precision"),
    "Run": ("output_dir", "resume", "checkpoint_every", "mode", "checkpoint", "dry_run"),
    "Device": ("device", "micro_batch_size"),
}
NEEDED = {  # mode -> the flags that it needs, each with an example
    "evaluate": {"checkpoint": "RUN/checkpoints"},
    "export": {"checkpoint": "RUN/checkpoints", "output_dir": "FOLDER"},
    "predict": {"checkpoint": "RUN/checkpoints", "image": "FILE"},
    "verify": {"checkpoint": "RUN/checkpoints"},
}
GROUPS = {"Recipe": Recipe, "Launch": Launch, "Run": Run}
RULES = (  # (whether a command line breaks the rule, what to say)
    (lambda s: s.run.workers is not None and not s.run.dry_run,
     "--workers only sets what to plan for; use it with --dry_run"),
    (lambda s: s.run.workers_per_node is not None and not s.run.dry_run,
     "--workers_per_node only sets what to plan for; use it with --dry_run"),
    (lambda s: s.trains and s.launch.elastic and ELASTIC not in os.environ,
     "--elastic needs horovodrun --min-np=N --max-np=N --host-discovery-script=SCRIPT"),
    (lambda s: s.trains and not s.launch.elastic and ELASTIC in os.environ,
     "horovodrun was started for a varying number of workers; add --elastic"),
    (lambda s: s.run.mode == "verify" and (s.launch.elastic or not s.launch.is_deterministic),
     "--mode=verify needs a run with --deterministic and without --elastic; others do not give the same bits again"),
    (lambda s: s.launch.stage_gb and not s.launch.stage_dir,
     "--stage_gb needs --stage_dir, a folder on a local disk of each node"),
    (lambda s: s.run.stop_at_target and s.run.target_top1 is None,
     "--stop_at_target needs --target_top1, such as --target_top1=0.759"),
    (lambda s: s.recipe.lr_schedule == "multistep" and not s.recipe.lr_boundaries,
     "--lr_schedule=multistep needs --lr_boundaries, such as --lr_boundaries=30,60,80"),
    (lambda s: s.recipe.pretrained and not model_zoo.MODELS[s.recipe.model].is_of_keras,
     f"--pretrained needs a network of Keras, such as --model={model_zoo.KERAS}MobileNetV3Small; other trained weights "
     "are read with --init_checkpoint"),
    (lambda s: s.recipe.pretrained and s.run.init_checkpoint,
     "--pretrained and --init_checkpoint both give the initial weights; remove one of them"),
    (lambda s: s.launch.elastic and s.launch.allreduce == "hierarchical",
     "--allreduce=hierarchical needs Horovod process sets, which --elastic rules out; use --allreduce=torus or ring"),
    (lambda s: s.launch.workers_schedule and s.launch.elastic,
     "--workers_schedule plans the number of workers, which --elastic finds out; remove one of them"),
    (lambda s: s.launch.sums_in_tree and s.launch.elastic,
     "--deterministic needs equal numbers of micro-batches, which --elastic does not have; use "
     "--deterministic=same_workers"),
    (lambda s: s.launch.sums_in_tree and s.launch.allreduce == "hierarchical",
     "--allreduce=hierarchical adds in another order on other numbers of workers; use --deterministic=same_workers"),
    (lambda s: s.launch.sums_in_tree and s.launch.compression == "fp16",
     "--compression=fp16 rounds differently on other numbers of workers; use --deterministic=same_workers"),
)


def parse(argv: Sequence[str]) -> Settings:
    """Returns the settings of a command line. argv[0] is the program. Raises UsageError, UserError.

    A recipe is read first, and the flags on the command line override it. The recipe is the file of --flagfile, or
    training.default_recipe chooses one.
    """
    recipes, given = recipes_first(argv[1:])
    source, fitted = (None, []) if recipes else default_recipe(_read([argv[0], *given]))
    values = _read([argv[0], *(recipes or [f"--flagfile={source}", *fitted]), *given])
    values.data_dir = named.absolute(values.data_dir)  # flags.txt has to mean the same from any folder
    values.init_checkpoint = values.init_checkpoint and str(Path(values.init_checkpoint).absolute())
    recorded = [name for name in (*flags.names(Recipe), *flags.names(Launch), "init_checkpoint")
                if values[name].value not in (None, [])]
    text = "\n".join(values[name].serialize() for name in recorded) + "\n"
    recipe, launch, run = (flags.parsed(values, group) for group in GROUPS.values())
    recipe = with_image_size(recipe)
    sizes = recipe.image_size
    values_given = {name: values[name].value for group in GROUPS.values() for name in flags.names(group)}
    values_given["image_size"] = sizes.values[0] if len(sizes.pairs) == 1 else str(sizes)
    file = source or Path(recipes[0].partition("=")[2])
    settings = Settings(recipe, launch, run, values_given, text, source, tuple(fitted), file)
    for name, example in NEEDED.get(run.mode, {}).items():
        if not getattr(run, name):
            raise UsageError(f"--mode={run.mode} needs --{name}={example}")
    for is_broken, problem in RULES:
        if is_broken(settings):
            raise UsageError(problem)
    _check_effect(settings, given)
    return settings


def with_image_size(recipe: Recipe) -> Recipe:
    """Returns the recipe with the model's own image size, unless it has one. Raises UserError."""
    info = model_zoo.MODELS[recipe.model]
    sizes = recipe.image_size or Piecewise.parse(info.image_size, int)
    if len({*sizes.values, recipe.validation_size or sizes.values[-1]}) > 1 and not info.any_image_size:
        raise UserError(f"--image_size={sizes}: the dense layers of {recipe.model} need one image size; give one size, "
                        "and no other --validation_size")
    return dataclasses.replace(recipe, image_size=sizes)


def define() -> absl_flags.FlagValues:
    """Returns all flags, with their defaults."""
    return flags.define(*GROUPS.values())


def help_text(argv: Sequence[str], full: bool = False) -> str:
    """Returns the help for the flags that most people need, or for all flags.

    Defaults are those of the recipe that the command line would read.
    """
    values = with_recipe(argv)
    lines = ["train.py trains a convolutional network, evaluates it and writes a report.", ""]
    groups = {f"{title} flags": flags.names(group) for title, group in GROUPS.items()} if full else FIRST_SCREEN
    for title, names in groups.items():
        lines += [f"{title}:", *flags.described(values, names), ""]
    lines.append("--flagfile=RECIPE reads flags from a file, or from a recipe of launch/recipes by its name.")
    if not full:
        lines.append(f"--helpfull lists all {sum(len(flags.names(group)) for group in GROUPS.values())} flags.")
    return "\n".join(lines)


def with_recipe(argv: Sequence[str]) -> absl_flags.FlagValues:
    """Returns all flags. Their defaults are those of the recipe that the command line would read, if it is right."""
    values = define()
    with contextlib.suppress(UserError):
        recipes, given = recipes_first([word for word in argv[1:] if not command.asks_for_help(["", word])])
        source, fitted = (None, []) if recipes else default_recipe(_read([argv[0], *given]))
        read = _read([argv[0], *(recipes or [f"--flagfile={source}", *fitted])])
        for name in read:
            if read[name].present:
                values.set_default(name, read[name].value)
    return values


def _read(argv: Sequence[str]) -> absl_flags.FlagValues:
    """Sets all flags from a command line. Raises UsageError.

    In --mode=predict, arguments that are not flags are further images, because a shell puts them there for *.jpg.
    """
    values = define()
    values.set_gnu_getopt(True)  # flags may follow them
    images = flags.read_with_arguments(values, argv)
    if images and values.mode != "predict":
        raise UsageError(f"'{images[0]}' is not a flag; --help lists all flags")
    if values.data_dir == "":
        raise UsageError("--data_dir is empty; give the folder of a dataset, or omit the flag for the digits")
    values.image = [*values.image, *images]
    for name in PATHS:
        given = values[name].value
        if isinstance(given, list):
            values[name].value = [os.path.expanduser(one) for one in given]
        elif given:
            values[name].value = os.path.expanduser(given)
    return values


PATHS = ("data_dir", "output_dir", "checkpoint", "init_checkpoint", "image", "stage_dir", "timeline", "mlperf_log")
INERT = {  # flag -> (whether it has no effect, which other flag is the reason)
    "warmup_epochs": (lambda s: s.recipe.warmup == "none", "--warmup=none"),
    "warmup_learning_rate": (lambda s: s.recipe.warmup == "none", "--warmup=none"),
    "lr_boundaries": (lambda s: s.recipe.lr_schedule != "multistep", "--lr_schedule other than multistep"),
    "poly_power": (lambda s: s.recipe.lr_schedule != "poly", "--lr_schedule other than poly"),
    "end_learning_rate": (lambda s: s.recipe.lr_schedule not in ENDING, "--lr_schedule other than poly and cosine"),
    "decay_from": (lambda s: s.recipe.lr_schedule in ("multistep", "constant"), "--lr_schedule=multistep or constant"),
    "base_batch_size": (lambda s: s.recipe.lr_scaling == "none", "--lr_scaling=none"),
    "momentum": (lambda s: not s.recipe.reads("momentum"), "this --optimizer"),
    "momentum_schedule": (lambda s: not s.recipe.reads("momentum"), "this --optimizer"),
    "trust_coefficient": (lambda s: not s.recipe.reads("trust_coefficient"), "this --optimizer"),
    "weight_decay": (lambda s: not s.recipe.reads("weight_decay"), "this --optimizer"),
    "exclude": (lambda s: not s.recipe.reads("exclude"), "this --optimizer"),
    "last_gamma": (lambda s: not model_zoo.MODELS[s.recipe.model].is_residual, "a --model without residual branches"),
    "momentum_correction": (lambda s: not s.recipe.reads("momentum"), "this --optimizer"),
    "nesterov": (lambda s: not s.recipe.reads("nesterov"), "this --optimizer"),
    "lars_epsilon": (lambda s: not s.recipe.reads("epsilon"), "this --optimizer"),
    "lars_clip": (lambda s: not s.recipe.reads("clip"), "this --optimizer"),
    "loss_scale": (lambda s: s.recipe.precision != "mixed_float16", "--precision other than mixed_float16"),
    "torus_grid": (lambda s: s.launch.allreduce != "torus", "--allreduce other than torus"),
    "fusion_mb": (lambda s: s.launch.deterministic == "same_workers" and s.launch.allreduce == "ring"
                  and s.launch.compression == "none",
                  "--deterministic=same_workers, which exchanges each gradient separately"),
    "output_dir": (lambda s: s.run.mode == "verify", "--mode=verify, which writes to a temporary folder"),
    "image": (lambda s: s.run.mode != "predict", "--mode other than predict"),
    "init_checkpoint": (lambda s: s.run.mode != "train", "--mode other than train"),
    "max_rollbacks": (lambda s: s.run.on_divergence == "stop", "--on_divergence=stop"),
}


def _check_effect(settings: Settings, given) -> None:
    """Raises UsageError for a flag on the command line, not in a recipe, that has no effect with the others."""
    words = {word.lstrip("-").partition("=")[0] for word in given if word.startswith("-")}
    for name, (is_inert, reason) in INERT.items():
        if name in words and is_inert(settings):
            raise UsageError(f"--{name} has no effect with {reason}; remove it")


def recipes_first(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (the --flagfile arguments, the rest), so that a flag overrides a recipe, whatever their order.

    A recipe is a file, or its name in launch/recipes. Raises UsageError.
    """
    recipes, rest, arguments = [], [], list(arguments)
    while arguments:
        argument = arguments.pop(0)
        if argument in ("--flagfile", "-flagfile") and arguments:
            argument = f"--flagfile={arguments.pop(0)}"
        (recipes if argument.startswith(("--flagfile=", "-flagfile=")) else rest).append(argument)
    try:
        return [f"--flagfile={recipe_path(one.partition('=')[2])}" for one in recipes], rest
    except UserError as error:
        raise UsageError(f"--flagfile: {error}") from None
