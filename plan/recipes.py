"""Recipes: flag files whose comments say where their settings come from and what the paper reports.

Without --flagfile, a command reads the recipe of a run, of the digits, or one that fits the dataset.
"""
import difflib
import math
from pathlib import Path

import model_zoo
from common.errors import UsageError, UserError
from common.flags import file_text
from common.run_folder import FLAGS, folder_of, has_checkpoints
from data import named
from data.set_aside import FRACTION, SetAside
from data.sources import BUILT_IN
from optim.schedules import Piecewise
from plan.values import sizes as parse_sizes

RECIPES = Path(__file__).parents[1] / "recipes"
DIGITS, SMALL, LARGE = (RECIPES / name for name in ("digits.flags", "small_images.flags", "images.flags"))
LARGE_SAMPLES = 50_000
FINE_TUNING_RATE = "--learning_rate=0.0003"  # of small_images.flags, from trained weights on, for all layers
SPAN_OF_MICRO_BATCH = "--batch_norm_span=auto"  # replaces a recipe's span that does not divide the batch
VERY_FEW = 200  # samples: a network soon overfits them
SAMPLES_SEEN = 40_000  # in all epochs


def recipe_path(name: str) -> Path:
    """Returns the file of a recipe: `name` is a file, or its name in recipes/. Raises UsageError."""
    for path in (Path(name).expanduser(), RECIPES / name, RECIPES / f"{name}.flags"):
        if path.is_file():
            return path.absolute()
    names = {path.stem: str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*.flags")}
    close = difflib.get_close_matches(Path(name).stem, names, 1, 0.5)
    suggestion = f"did you mean {names[close[0]]}?" if close else "recipes/README.md lists the recipes"
    raise UsageError(f"there is no recipe {name}; {suggestion}")


def read(path: Path) -> dict[str, str]:
    """Reads a recipe: its title, the fields of its comment (Row, Reported, Rehearsed, ...), its flags."""
    fields, last = {}, "title"
    for line in file_text(path).splitlines():
        if line.startswith("--"):
            name, _, value = line[2:].partition("=")
            fields[name] = value
        elif line.startswith("#   "):
            fields[last] = f"{fields.get(last, '')} {line[4:]}".strip()
        elif line.startswith("# "):
            last, separator, value = line[2:].partition(": ")
            if not fields or not separator:
                last, value = "title", line[2:]
            fields[last] = value
    return fields


def flags_in(text: str) -> dict[str, str]:
    """Returns the value of each flag in the text of a run's flags.txt."""
    values = {}
    for line in text.splitlines():
        name, separator, value = line.strip().removeprefix("--").partition("=")
        if line.startswith("--") and separator:
            values[name] = value
        elif line.startswith("--"):
            values[name.removeprefix("no")] = str(not name.startswith("no")).lower()
    return values


def default_recipe(values) -> tuple[Path, list[str]]:
    """Returns the recipe for a command line, and flags that fit it to the dataset. Raises UserError.

    values: absl's FlagValues of the command line without a recipe. These flags override the recipe and those that fit
    it. If the recipe's batch-norm span does not divide their batch or micro-batch size, the span becomes a micro-batch.
    """
    path, fitted_flags = _chosen(values)
    span = flags_in("\n".join([file_text(path), *fitted_flags])).get("batch_norm_span")
    sizes = [size for name in ("batch_size", "micro_batch_size") if values[name].present
             for size in parse_sizes(values[name].value).values]
    if path in (DIGITS, SMALL, LARGE) and not values["batch_norm_span"].present and any(
            size % int(span) for size in sizes):
        fitted_flags.append(SPAN_OF_MICRO_BATCH)
    return path, [*{flag[2:].partition("=")[0]: flag for flag in fitted_flags}.values()]


def _chosen(values) -> tuple[Path, list[str]]:
    if values.checkpoint and values.mode != "train":
        return flags_of_run(values.checkpoint, "--checkpoint"), []
    if not values["data_dir"].present or values.data_dir in BUILT_IN:
        return DIGITS, of_initial_weights(values)
    resumed = Path(values.output_dir or "", FLAGS)
    if values.output_dir and values.resume == "auto" and resumed.is_file() and has_checkpoints(resumed.parent):
        return resumed, []
    samples = values.train_samples or named.count_train_samples(
        values.data_dir, LARGE_SAMPLES, values.validation_fraction, values.label_column)
    own_size = [f"--image_size={model_zoo.MODELS[values.model].image_size}"] if (
        values["model"].present and values.model in model_zoo.MODELS) else []  # MODULE:FUNCTION has none
    if samples >= LARGE_SAMPLES:
        return LARGE, [*own_size, *of_initial_weights(values)]
    epochs = values.epochs if values["epochs"].present else None
    is_trained = bool(values.pretrained or values.pretrained_weights or values.init_checkpoint)
    return SMALL, [*fitted(samples, epochs, is_trained), *own_size, *of_initial_weights(values),
                   *([FINE_TUNING_RATE] if is_trained and not values.freeze else [])]


def fitted(samples: int, epochs: float | None = None, is_trained: bool = False) -> list[str]:
    """Returns the flags that fit small_images.flags to a number of training samples.

    The batch is at most an eighth of them, batch norm covers the whole batch, and there are about six evaluations.

    epochs: number on the command line, or None. is_trained: whether training starts from trained weights.
    """
    batch = min(32, 2 ** int(math.log2(max(1, samples // 8))))
    own = (40 if samples < VERY_FEW else max(16, min(80, SAMPLES_SEEN // samples))) // (2 if is_trained else 1)
    return [f"--batch_size={batch}", f"--batch_norm_span={batch}", f"--epochs={own:g}",
            f"--evaluate_every={max(1, int(epochs or own) // 6)}"]


def of_initial_weights(values) -> list[str]:
    """Returns flags with the model and image size of the run of --init_checkpoint; none if --model is given."""
    if not values.init_checkpoint or values["model"].present:
        return []
    theirs = flags_in(file_text(flags_of_run(values.init_checkpoint, "--init_checkpoint")))
    sizes = theirs.get("image_size", str(model_zoo.MODELS[theirs["model"]].image_size))
    return [f"--model={theirs['model']}", f"--image_size={Piecewise.parse(sizes, int).values[-1]}"]


def data_of_run(checkpoint: str) -> tuple[str | None, SetAside]:
    """Returns --data_dir and --validation_fraction of the run of a checkpoint. --data_dir is None if it is not known.
    """
    file = folder_of(checkpoint) / FLAGS
    recorded = flags_in(file_text(file)) if file.is_file() else {}
    return recorded.get("data_dir"), SetAside(recorded.get("validation_fraction", FRACTION))


def flags_of_run(checkpoint: str, flag: str) -> Path:
    """Returns flags.txt of the run of a checkpoint. Raises UserError if there is none."""
    recorded = folder_of(checkpoint) / FLAGS
    if not recorded.is_file():
        raise UserError(f"{flag}: {checkpoint} is not in a run folder: {recorded} does not exist; give "
                        "RUN/checkpoints, or the recipe with --flagfile")
    return recorded
