"""The command line: each flag, its default and values. Imports nothing heavy, so that a wrong flag fails at once."""
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from absl import flags as absl_flags

import model_zoo
import optim
from data import augmentation, named
from optim import route, schedules
from training.errors import UserError
from training.plan import Every
from training.workers import ELASTIC

DEFAULT_RECIPE = Path(__file__).parents[1] / "launch" / "recipes" / "digits.flags"
MODES = ("train", "evaluate")


class UsageError(Exception):
    """A flag is unknown, malformed or not among its values."""


def parse(argv: Sequence[str]) -> tuple[SimpleNamespace, str]:
    """(flags as attributes, the text of flags.txt) for a command line, argv[0] being the program. Raises UsageError.

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
    config = SimpleNamespace(**{name: values[name].value for group in GROUPS for name in values.groups[group]})
    config.image_size = config.image_size or model_zoo.MODELS[config.model].image_size
    recorded = [name for group in ("Recipe", "Launch") for name in values.groups[group]]
    lines = [values[name].serialize() for name in recorded if values[name].value not in (None, [])]
    return config, "\n".join(lines) + "\n"


def recipe(config: SimpleNamespace) -> dict:
    """What is trained: the recipe's flags but for the folder of the data, which may move."""
    return {name: getattr(config, name) for name in define().groups["Recipe"] if name != "data_dir"}


def help_text() -> str:
    values, lines = define(), ["train.py: trains, evaluates and reports; see README.md.", ""]
    for group in GROUPS:
        lines.append(f"{group} flags:")
        lines += [*described(values, values.groups[group]), ""]
    lines.append("--flagfile=FILE reads flags from a file; without it launch/recipes/digits.flags is read first.")
    return "\n".join(lines)


def described(values: absl_flags.FlagValues, names) -> list[str]:
    """What a help text says of each of these flags."""
    lines = []
    for name in names:
        flag = values[name]
        default = "" if flag.default is None else f" (default: {flag.default_as_str.strip(chr(39))})"
        lines.append(absl_flags.text_wrap(f"--{name}: {flag.help}{default}", 110, "      ", "  "))
    return lines


def _read(argv):
    recipes, given = _recipes_first(argv[1:])
    values = _parse([argv[0], *(recipes or [f"--flagfile={DEFAULT_RECIPE}"]), *given])
    if values.mode == "evaluate" and values.checkpoint and not recipes:
        recorded = run_folder(values.checkpoint) / "flags.txt"
        if not recorded.is_file():
            raise UserError(f"--checkpoint: {values.checkpoint} lies in no run's folder, there is no {recorded}; give "
                            "RUN/checkpoints, or the recipe by --flagfile")
        values = _parse([argv[0], f"--flagfile={recorded}", *given])
    values.data_dir = named.absolute(values.data_dir)  # a run's flags.txt has to mean the same elsewhere
    return values


def _recipes_first(arguments):
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


def _parse(argv):
    values = define()
    try:
        rest = values(argv)
        for name in values:
            if isinstance(values[name].value, float) and not math.isfinite(values[name].value):
                raise absl_flags.Error(f"flag --{name}={values[name].value}: not a finite number")
    except (absl_flags.Error, UnicodeDecodeError) as error:
        raise UsageError(" ".join(str(error).split())[:1000]) from None
    except RecursionError:  # absl looks for the flag that was meant, letter by letter
        raise UsageError("no flag has so long a name") from None
    if len(rest) > 1:
        raise UsageError(f"'{rest[1]}' is not a flag; train.py --help lists them")
    return values


class _Values(absl_flags.FlagValues):
    """absl's flags, which also know the group that each was defined in."""

    def __init__(self):
        super().__init__()
        self.__dict__["groups"] = {group: [] for group in GROUPS}


def define() -> absl_flags.FlagValues:
    values = _Values()
    for group, definitions in GROUPS.items():
        before = set(values)
        definitions(values)
        values.groups[group].extend(name for name in values if name not in before)
    return values


def _recipe(values):
    v = {"flag_values": values}
    text, number, whole, choice = (absl_flags.DEFINE_string, absl_flags.DEFINE_float, absl_flags.DEFINE_integer,
                                   absl_flags.DEFINE_enum)
    text("data_dir", "digits", "A prepared dataset's folder; one with train/ and val/ of a folder of images a class; "
         f"built in: {', '.join(named.BUILT_IN)}; synthetic:SAMPLES, random data that stays on the device.", **v)
    choice("model", "resnet20", list(model_zoo.MODELS), "The network.", **v)
    whole("image_size", None, "Pixels a side of the network's input; by default what the model is meant for.",
          lower_bound=1, upper_bound=4096, **v)
    number("epochs", 90.0, "Length of the training, in passes over the training set.", lower_bound=1e-9,
           upper_bound=1e5, **v)
    text("batch_size", "256", "Global batch size, summed over the workers; or epoch:size pairs, 0:34816,30:69632.", **v)
    choice("optimizer", "lars", list(optim.OPTIMIZERS), "The update rule.", **v)
    text("learning_rate", "5", "Base rate; or epoch:rate pairs, 0:29,30:50, each holding from its epoch on.", **v)
    choice("lr_scaling", "none", list(schedules.SCALINGS),
           "How the rate grows from --base_batch_size to the first phase's batch size.", **v)
    whole("base_batch_size", 256, "The batch size that --learning_rate is meant for.", lower_bound=1, **v)
    choice("lr_schedule", "poly", list(schedules.DECAYS), "How the rate decays.", **v)
    number("poly_power", 2.0, "The power of --lr_schedule=poly.", lower_bound=0.0, **v)
    choice("decay_from", "start", schedules.DECAY_CLOCKS, "Whether decay counts from epoch 0 or warm-up's end.", **v)
    absl_flags.DEFINE_list("lr_boundaries", [], "Epochs at which multistep cuts the rate to a tenth.", **v)
    choice("warmup", "none", schedules.WARMUPS, "gradual rises to the rate, constant stays at the warm-up rate.", **v)
    number("warmup_epochs", 0.0, "Length of the warm-up.", lower_bound=0.0, **v)
    number("warmup_learning_rate", 0.0, "The rate at which warm-up starts, or stays.", lower_bound=0.0, **v)
    number("momentum", 0.9, "Momentum.", lower_bound=0.0, upper_bound=1.0, **v)
    choice("momentum_schedule", "constant", schedules.MOMENTUM_SCHEDULES,
           "noise_scale: 1 - (1 - momentum) * batch / 32768 (arXiv:1811.05233, configuration B).", **v)
    number("weight_decay", 0.0, "Weight decay.", lower_bound=0.0, **v)
    number("trust_coefficient", 0.001, "LARS's trust coefficient.", lower_bound=0.0, **v)
    number("lars_epsilon", 0.0, "Added to the denominator of LARS's trust ratio.", lower_bound=0.0, **v)
    absl_flags.DEFINE_list("lars_exclude", [], "Suffixes of variables (gamma,beta,bias) that take a plain momentum "
                           "step without weight decay.", **v)
    number("label_smoothing", 0.0, "Probability spread evenly over all classes.", lower_bound=0.0, upper_bound=1.0, **v)
    choice("precision", "float32", ["float32", "mixed_float16", "mixed_bfloat16"],
           "Of the forward and backward pass; float16 with a dynamic loss scale. Updates are in float32.", **v)
    number("batch_norm_momentum", 0.9, "Of the moving statistics.", lower_bound=0.0, upper_bound=1.0, **v)
    choice("batch_norm_statistics", "moving", ["moving", "exact"],
           "What evaluation uses; exact: measured on training batches before each (arXiv:1811.05233, 3.2).", **v)
    choice("augmentation", "none", list(augmentation.AUGMENTATIONS), "How training images are varied.", **v)
    whole("seed", 0, "Of the initial weights, the order of samples and the augmentation.", lower_bound=0,
          upper_bound=2**32 - 1, **v)
    _check(values, "batch_size", lambda t: all(0 < n < 2**31 for n in schedules.Piecewise.parse(t, int).values))
    _check(values, "learning_rate", lambda t: all(0 <= n < 1e30 for n in schedules.Piecewise.parse(t).values))
    _check(values, "lr_boundaries", lambda items: [float(n) for n in items] == sorted({float(n) for n in items}))


def _launch(values):
    v = {"flag_values": values}
    absl_flags.DEFINE_integer("micro_batch_size", None, "Samples that a worker holds in memory at a time; by default "
                              "the largest divisor of batch / workers that is at most 64.", lower_bound=1, **v)
    absl_flags.DEFINE_enum("dali_device", "auto", ["auto", "cpu", "gpu"],
                           "Where images are decoded and augmented; auto: on the GPU where TensorFlow sees one.", **v)
    absl_flags.DEFINE_integer("dali_threads", None, "DALI's threads a worker; by default the cores that it has.",
                              lower_bound=1, **v)
    absl_flags.DEFINE_float("hw_decoder_load", 0.65, "The share of images that go to a GPU's hardware decoder.",
                            lower_bound=0.0, upper_bound=1.0, **v)
    absl_flags.DEFINE_string("stage_dir", None, "A folder on a disk of each node's own, to which the dataset is copied "
                             "first, once a node.", **v)
    absl_flags.DEFINE_enum("allreduce", "ring", list(route.ALLREDUCES), "How gradients are summed over the workers; "
                           "torus: along the rows of a grid, then its columns (arXiv:1811.05233, 2.2).", **v)
    absl_flags.DEFINE_string("torus_grid", "auto", "Of --allreduce=torus, horizontal x vertical, such as 4x2; auto: "
                             "the one in which messages take the least time.", **v)
    absl_flags.DEFINE_float("fusion_mb", None, "Gradients that are exchanged as one, in megabytes before compression; "
                            "by default 32 in a torus, and in a ring what Horovod does.", lower_bound=1e-3,
                            upper_bound=1e5, **v)
    absl_flags.DEFINE_enum("compression", "none", ["none", "fp16"], "Of gradients while they are exchanged.", **v)
    absl_flags.DEFINE_bool("xla", False, "Compile the forward and backward pass.", **v)
    absl_flags.DEFINE_bool("deterministic", False, "The same weights, to the bit, each time on the same number of "
                           "workers, whether stopped and resumed or not.", **v)
    absl_flags.DEFINE_bool("elastic", False, "Go on when workers are lost or join, under horovodrun --min-np=N "
                           "--max-np=N --host-discovery-script=SCRIPT.", **v)
    _check(values, "torus_grid", lambda text: route.parse_grid(text) or True)


def _run(values):
    v = {"flag_values": values}
    absl_flags.DEFINE_enum("mode", "train", MODES, "evaluate: the newest of --checkpoint on the validation set.", **v)
    absl_flags.DEFINE_string("output_dir", None, "The run's folder; by default a new one under runs/.", **v)
    absl_flags.DEFINE_string("checkpoint", None, "For --mode=evaluate: RUN/checkpoints, or one of those in it.", **v)
    absl_flags.DEFINE_enum("resume", "auto", ["auto", "never"], "auto: go on from the newest checkpoint in "
                           "--output_dir, if there is one; never: start anew, and remove what is there.", **v)
    absl_flags.DEFINE_string("checkpoint_every", "1", "From one checkpoint to the next: 1 or 0.5, in epochs; 10m, in "
                             "minutes. There is always one at the end.", **v)
    absl_flags.DEFINE_enum("on_divergence", "stop", ["stop", "rollback"], "What to do when the loss or a gradient is "
                           "no longer a number, or the loss explodes: stop, or go back to the last checkpoint and on "
                           "with the data after those that did it.", **v)
    absl_flags.DEFINE_integer("max_rollbacks", 3, "How often to roll back before it is an error.", lower_bound=0, **v)
    absl_flags.DEFINE_bool("log_trust_ratios", False, "Record the norms of each layer's weights and gradients and its "
                           "trust ratio, an epoch each, in TensorBoard and the report.", **v)
    absl_flags.DEFINE_bool("save_augmentations", False, "Write augmentations.png into the run's folder: training "
                           "images as the network sees them.", **v)
    absl_flags.DEFINE_string("timeline", None, "A file for Horovod's timeline of the exchange, for "
                             "chrome://tracing.", **v)
    absl_flags.DEFINE_bool("dry_run", False, "Print the plan as JSON and stop.", **v)
    absl_flags.DEFINE_integer("workers", None, "With --dry_run: plan for so many workers.", lower_bound=1, **v)
    absl_flags.DEFINE_integer("workers_per_node", None, "With --dry_run: so many on each node; by default as launched, "
                              "or with --workers 4, as in arXiv:1811.05233.", lower_bound=1, **v)
    absl_flags.DEFINE_integer("train_samples", None, "With --dry_run: plan for so many training samples, without the "
                              "dataset.", lower_bound=1, **v)
    _check(values, "checkpoint_every", Every.parse)


GROUPS = {"Recipe": _recipe, "Launch": _launch, "Run": _run}


def _check(values, name, test):
    """Refuses a value for which the test is false or raises ValueError."""
    def checker(value):
        try:
            return test(value)
        except ValueError as error:
            raise absl_flags.ValidationError(str(error)) from None

    absl_flags.register_validator(name, checker, f"the value of --{name} is out of range", flag_values=values)
