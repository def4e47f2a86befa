"""The command line: reads the flags that settings.py declares. Imports nothing heavy, so a wrong flag fails at once."""
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from absl import flags as absl_flags

import model_zoo
from common import command, flags, own
from common.errors import UsageError, UserError, shown
from common.launcher import ELASTIC
from data import named
from data.augmentation import AUGMENTATIONS
from optim.schedules import Piecewise
from plan.recipes import default_recipe, recipe_path
from plan.settings import Launch, Recipe, Run, Settings, Source
from plan.shares import kept_shares

NEEDED = {  # mode -> the flags that it needs, each with an example
    "evaluate": {"checkpoint": "RUN/checkpoints/best"},
    "export": {"checkpoint": "RUN/checkpoints/best", "output_dir": "FOLDER"},
    "predict": {"checkpoint": "RUN/checkpoints/best", "image": "FILE"},
}
GROUPS = {"Recipe": Recipe, "Launch": Launch, "Run": Run}
FLAGS = {field.name: field.metadata for group in GROUPS.values() for field in dataclasses.fields(group)}
RULES = (  # (whether a command line breaks the rule, what to say)
    (lambda s: s.run.workers is not None and not s.run.dry_run,
     "--workers only sets what to plan for; use it with --dry_run"),
    (lambda s: s.run.workers_per_node is not None and not s.run.dry_run,
     "--workers_per_node only sets what to plan for; use it with --dry_run"),
    (lambda s: s.trains and s.launch.elastic and ELASTIC not in os.environ,
     "--elastic needs horovodrun --min-np=N --max-np=N --host-discovery-script=SCRIPT, as python -m distributed.gloo"),
    (lambda s: s.trains and not s.launch.elastic and ELASTIC in os.environ,
     "horovodrun was started for a varying number of workers; add --elastic"),
    (lambda s: s.launch.stage_gb and not s.launch.stage_dir,
     "--stage_gb needs --stage_dir, a folder on a local disk of each node"),
    (lambda s: s.recipe.order == "file" and s.recipe.shuffle_group,
     "--shuffle_group shuffles samples, and --order=file reads them as they were written; remove one of them"),
    (lambda s: s.recipe.order == "file" and s.recipe.repeats > 1,
     "--repeats takes images several times in an epoch, and --order=file each of them once; remove one of them"),
    (lambda s: s.run.stop_at_target and s.run.target_top1 is None,
     "--stop_at_target needs --target_top1, such as --target_top1=0.759"),
    (lambda s: s.run.stop_below_expected is not None and not s.run.expect,
     "--stop_below_expected needs --expect=FILE, such as metrics.jsonl of another run"),
    (lambda s: s.recipe.lr_schedule == "multistep" and not s.recipe.lr_boundaries,
     "--lr_schedule=multistep needs --lr_boundaries, such as --lr_boundaries=30,60,80"),
    (lambda s: s.recipe.is_pretrained and not model_zoo.MODELS[s.recipe.model].is_of_keras,
     "--pretrained and --pretrained_weights need a network of Keras, such as "
     f"--model={model_zoo.KERAS}MobileNetV3Small; other trained weights are read with --init_checkpoint"),
    (lambda s: s.recipe.is_pretrained and s.run.init_checkpoint and any(
        map(s.is_given, ("pretrained", "pretrained_weights"))),
     "--pretrained or --pretrained_weights, and --init_checkpoint, both give the initial weights; remove one of them"),
    (lambda s: s.recipe.pretrained and s.recipe.pretrained_weights,
     "--pretrained and --pretrained_weights both give the initial weights; remove one of them"),
    (lambda s: s.recipe.freeze and s.recipe.batch_norm_statistics == "exact",
     "--freeze keeps batch norm's statistics, and --batch_norm_statistics=exact measures new ones; remove one of them"),
    (lambda s: s.recipe.warmup != "none" and s.recipe.warmup_epochs > s.recipe.epochs
     and s.is_given("warmup_epochs"),
     "--warmup_epochs is longer than --epochs; give a shorter warm-up or train longer"),
    (lambda s: s.recipe.loss == "binary_cross_entropy" and s.recipe.label_smoothing > 0.4,
     "--loss=binary_cross_entropy takes targets above 0.2 as 1; with --label_smoothing above 0.4, another class could "
     "be one; lower it"),
    (lambda s: s.launch.elastic and s.launch.allreduce == "hierarchical",
     "--allreduce=hierarchical needs Horovod process sets, which --elastic rules out; use --allreduce=torus or ring"),
    (lambda s: s.run.mode == "train" and s.launch.xla == "true" and s.launch.is_deterministic
     and model_zoo.MODELS[s.recipe.model].has_max_pooling,
     "--xla has no deterministic gradient of max pooling, which this --model has; use --xla=auto, or remove --xla or "
     "--deterministic"),
    (lambda s: s.launch.workers_schedule and s.launch.elastic,
     "--workers_schedule plans the number of workers, which --elastic finds out; remove one of them"),
)


def parse(argv: Sequence[str]) -> Settings:
    """Returns the settings of a command line. argv[0] is the program. Raises UsageError, UserError.

    The flags on the command line override those of the recipe. The recipe is the file of --flagfile, or the one that
    plan.recipes.default_recipe chooses.
    """
    program, *arguments = argv
    recipes, given = recipes_first(arguments)
    typed = _read([program, *given])  # the command line alone
    file, words = _recipe(recipes, typed)
    original, values = _read([program, *words]), _read([program, *words, *given])  # the recipe alone; both
    values.data_dir = named.absolute(values.data_dir)  # so that flags.txt works from any folder
    for name in ("init_checkpoint", "pretrained_weights", "expect"):
        values[name].value = values[name].value and str(Path(values[name].value).absolute())
    recorded = [name for name, about in FLAGS.items() if values[name].value not in (None, [])
                and (about.get("recorded") or name not in flags.names(Run))]
    text = "\n".join(values[name].serialize() for name in recorded) + "\n"
    origins = {name: "command line" if typed[name].present else "recipe" for name in recorded if values[name].present}
    recipe, launch, run = (flags.parsed(values, group) for group in GROUPS.values())
    recipe = with_image_size(recipe)
    sizes = recipe.image_size
    unparsed = {name: values[name].value for group in GROUPS.values() for name in flags.names(group)}
    for name, value in unparsed.items():
        if name != "image" and shown(str(value)) != str(value):
            raise UsageError(f"--{name}={shown(value)} is not UTF-8, which TensorFlow and DALI need; rename it")
    unparsed["image_size"] = sizes.values[0] if len(sizes.pairs) == 1 else str(sizes)
    fitted = tuple(word for word in words[1:] if not (recipes or typed[word[2:].partition("=")[0]].present))
    source = Source(file, not recipes, fitted, flags.parsed(original, Recipe), origins)
    settings = Settings(recipe, launch, run, unparsed, text, source, without_effect(values, typed))
    check(settings)
    return settings


def _recipe(recipes: list[str], typed: absl_flags.FlagValues) -> tuple[Path, list[str]]:
    """Returns the recipe of a command line, and the flags that read it: those of --flagfile, or the default ones."""
    if recipes:
        return Path(recipes[0].partition("=")[2]), recipes
    file, fitted = default_recipe(typed)
    return file, [f"--flagfile={file}", *fitted]


def check(settings: Settings) -> None:
    """Raises UsageError for flags that are missing or contradict each other."""
    run = settings.run
    for name, example in NEEDED.get(run.mode, {}).items():
        if not getattr(run, name):
            raise UsageError(f"--mode={run.mode} needs --{name}={example}")
    for is_broken, problem in RULES:
        if is_broken(settings):
            raise UsageError(problem)
    for name in ("batch_size", "batch_norm_span", "image_size") if settings.run.mode == "train" else ():
        phases, epochs = getattr(settings.recipe, name), settings.recipe.epochs
        if phases and phases.boundaries[-1] >= epochs:
            kept = not settings.is_given(name) and " ".join(kept_shares(settings)[1])
            cure = f"keep the recipe's shares with {kept}" if kept else "remove the phase"
            raise UsageError(f"--{name}={phases} has a phase that starts at or after --epochs={epochs:g}; raise "
                             f"--epochs, or {cure}")


def check_own(settings: Settings, observers: bool = True) -> None:
    """Raises UserError if a MODULE:NAME on the command line cannot be imported.

    observers: whether to check those, too. False among several workers: rank 0 alone imports observers, and if it ended
    here, mpirun might hang, because the other ranks would be in MPI_Init.
    """
    recipe = settings.recipe
    for flag, name, known in (("--model", recipe.model, model_zoo.MODELS),
                              ("--augmentation", recipe.augmentation, AUGMENTATIONS),
                              *(("--observer", name, ()) for name in settings.run.observer if observers)):
        if name not in known:
            own.check(flag, name)


def with_image_size(recipe: Recipe) -> Recipe:
    """Returns the recipe with the model's own image size, unless it has one. Raises UsageError."""
    info = model_zoo.MODELS[recipe.model]
    sizes = recipe.image_size or Piecewise.parse(info.image_size, int)
    used = {*sizes.values, recipe.validation_size or sizes.values[-1]}
    if min(used) < info.least_image_size:
        raise UsageError(f"{recipe.model} needs images of at least {info.least_image_size} pixels, not {min(used)}; "
                         "raise --image_size or --validation_size")
    if len(used) > 1 and not info.any_image_size:
        raise UsageError(f"--image_size={sizes}: the dense layers of {recipe.model} need one image size; give one "
                         "size, and no other --validation_size")
    return dataclasses.replace(recipe, image_size=sizes)


def define(own: type | None = None, borrowed: Iterable[str] = ()) -> absl_flags.FlagValues:
    """Returns all flags, with their defaults.

    own: dataclass with the flags of another program; they replace flags of train.py with the same name. borrowed: the
    flags of train.py that this program also has. Default: all.
    """
    values = flags.define(*GROUPS.values())
    if own:
        theirs, values = values, flags.define(own)
        for name in borrowed or theirs:
            if name not in values:
                values[name] = theirs[name]
    return values


def help_text(argv: Sequence[str]) -> str:
    """Returns the help for the flags that most people need, or with --helpfull for all flags.

    Defaults are those of the recipe that the command line would read.
    """
    values, full = with_recipe(argv), any("helpfull" in word for word in argv[1:])
    lines = ["train.py trains a convolutional network, evaluates it and writes a report.", ""]
    groups = {f"{title} flags": flags.names(group) for title, group in GROUPS.items()} if full else first_screen()
    for title, names in groups.items():
        lines += [f"{title}:", *flags.described(values, names), ""]
    lines.append("--flagfile=RECIPE reads flags from a file, or from a recipe of recipes/ by its name.")
    if not full:
        lines.append(f"--helpfull lists all {len(FLAGS)} flags.")
    return "\n".join(lines)


def first_screen() -> dict[str, list[str]]:
    """Returns the titles of the first screen of the help, and the flags under each."""
    groups = {}
    for name, about in FLAGS.items():
        if title := about.get("screen"):
            groups.setdefault(title, []).append(name)
    return groups


def with_recipe(argv: Sequence[str]) -> absl_flags.FlagValues:
    """Returns all flags. Their defaults are those of the recipe of a command line, unless that has errors."""
    values = define()
    with contextlib.suppress(UserError):
        recipes, given = recipes_first([word for word in argv[1:] if not command.asks_for_help(["", word])])
        read = _read([argv[0], *_recipe(recipes, _read([argv[0], *given]))[1]])
        for name in read:
            if read[name].present:
                values.set_default(name, read[name].value)
    return values


def _read(argv: Sequence[str]) -> absl_flags.FlagValues:
    """Sets all flags from a command line. Raises UsageError.

    In --mode=predict, arguments that are not flags are further images, because a shell puts them there for *.jpg.
    """
    values = define()
    images = flags.read_with_arguments(values, argv, dict.fromkeys(
        flags.GPUS, "start one worker per GPU: horovodrun --gloo -np N python train.py"))
    if images and values.mode != "predict":
        raise flags.not_a_flag(values, argv, images[0])
    values.image = [*values.image, *images]
    return values


def without_effect(values: absl_flags.FlagValues, typed: absl_flags.FlagValues) -> tuple[str, ...]:
    """Returns a sentence for each flag on the command line that has no effect with the values of other flags.

    Raises UsageError for a flag that may not be given with this --mode. typed: the flags of the command line alone,
    without a recipe.
    """
    present = {name: about for name, about in FLAGS.items() if typed[name].present}
    for name, about in present.items():
        if values.mode not in about.get("modes", (values.mode,)):
            raise UsageError(f"--{name} has no effect with --mode={values.mode}; remove it")
    given = {name: values[name].value for name in values}
    return tuple(f"--{name} has no effect {reason}" for name in present if (reason := obstacle(name, given)))


def obstacle(name: str, given: Mapping[str, object]) -> str:
    """Returns why a flag has no effect with the others, such as `with --optimizer=adam`, or an empty string.

    given: value of each flag.
    """
    for other, needed in FLAGS[name].get("used_with", {}).items():
        if (value := given[other]) not in needed:
            return {True: f"with --{other}", False: f"without --{other}"}.get(value, f"with --{other}={value}")
    return ""


def recipes_first(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (the --flagfile arguments, the rest). Reading them in this order lets every flag override a recipe.

    --flagfile takes a file, or the name of a recipe in recipes/. Raises UsageError.
    """
    recipes, rest, arguments = [], [], list(arguments)
    while arguments:
        argument = arguments.pop(0)
        if argument in ("--flagfile", "-flagfile") and arguments:
            argument = f"--flagfile={arguments.pop(0)}"
        (recipes if argument.startswith(("--flagfile=", "-flagfile=")) else rest).append(argument)
    try:
        return [f"--flagfile={recipe_path(argument.partition('=')[2])}" for argument in recipes], rest
    except UserError as error:
        raise UsageError(f"--flagfile: {error}") from None
