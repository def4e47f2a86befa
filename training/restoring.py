"""Reads checkpoints, and gives a model their weights: to continue, to evaluate, to use, or to start from."""
import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from common import VERSION
from common.errors import UserError, complain, one_line
from common.files import followed, stand_in, start_of
from common.run_folder import CHECKPOINTS
from data.class_names import normal
from data.dataset import IMAGENET_MEAN, IMAGENET_STD
from model_zoo.applications import load_pretrained
from model_zoo.layers import last_layer
from model_zoo.weights import damage
from training.outcomes import Outcomes
from training.state import INPUT, model_variables, named
from training.weight_check import GROUPS

# Raise it when a flag changes its meaning, or samples their order: a checkpoint of another version is not continued.
# 1 (checkpoints without a version): batch norm's moving statistics moved once per micro-batch, and the learning rate
# could change one step after the batch size at a fractional epoch. 2: LMDB and RecordIO were read file by file. 3:
# mixing and brightness had the same random numbers, and so had augmentation and the order of epochs 1 to 3.
MEANING = 4
ALIKE = 0.01  # relative difference of two means over the same images, at most
DESCRIPTION = "description"  # name of the tensor that holds, as JSON, everything except the variables
OUTCOMES = "outcomes"  # name of the tensor that holds those of the best evaluation, (fields of Outcomes, samples)
FILES = "variables.index", "variables.data-00000-of-00001"
NONE_READABLE = "{flag}: {path} contains no readable checkpoint; give the folder RUN/checkpoints of a training run"


class Damaged(Exception):
    """Raised for a checkpoint whose files can be opened, but not read."""


def read(path: Path) -> tuple[dict, dict]:
    """Returns (tensors by name, description) of a checkpoint folder. Raises Damaged, and OSError as `_opened`."""
    with _opened(path) as reader:
        names = [name for name in reader.get_variable_to_shape_map() if name not in (DESCRIPTION, OUTCOMES)]
        return {name: reader.get_tensor(name) for name in names}, _description(reader)


def describe(path: Path) -> dict:
    """Returns the description in a checkpoint folder: everything except the variables. Raises as `read`."""
    with _opened(path) as reader:
        return _description(reader)


def best_outcomes(run: Path, best: dict | None) -> Outcomes | None:
    """Returns the outcomes of a run's best evaluation, or None if its checkpoint is not on disk or lacks them.

    best: that evaluation: epoch, top1.
    """
    with contextlib.suppress(Damaged, OSError), _opened(followed(run / CHECKPOINTS / "best")) as reader:
        described = _description(reader)
        if best and all(described[name] == best[name] for name in ("epoch", "top1")) and reader.has_tensor(OUTCOMES):
            return Outcomes(*reader.get_tensor(OUTCOMES))
    return None


def _description(reader) -> dict:
    described = json.loads(reader.get_tensor(DESCRIPTION))
    if "classes" in described:  # earlier versions stored them as they came
        described["classes"] = [*map(normal, described["classes"])]
    return described


@contextlib.contextmanager
def _opened(path: Path) -> Iterator:
    """Context manager for TensorFlow's reader of a checkpoint. Raises Damaged, and OSError if a file cannot be opened.

    TensorFlow takes a path for a pattern, in which [ and \\ are special. So the reader gets the folder's descriptor.
    """
    for name in FILES:
        if words := stand_in(start_of(path / name)):
            raise Damaged(f"{name} is {words}")
    descriptor = os.open(path, os.O_RDONLY)
    folder = f"/proc/self/fd/{descriptor}"
    try:
        yield tf.train.load_checkpoint(f"{folder}/variables")
    except (tf.errors.OpError, ValueError, IndexError, RuntimeError, SystemError) as error:
        raise Damaged(one_line(error).replace(folder, str(path))[:200]) from None
    finally:
        os.close(descriptor)


def intact(path: Path) -> Iterator[tuple[Path, dict, dict]]:
    """Yields (path, tensors, description) of each intact checkpoint, newest first.

    Names damaged and incomplete ones on standard error.

    path: a run's folder, its checkpoints/, or one checkpoint in it. Raises OSError for one that cannot be opened, which
    may be intact and newer than the next.
    """
    path = followed(path)
    within = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    for candidate in [path] if (path / "variables.index").exists() else saved_in(within):
        try:
            tensors, described = read(candidate)
            if "classes" not in described:
                raise UserError(f"{candidate} was written by a Bigbatch before 0.9.0, which {VERSION} does not read; "
                                "use the version that wrote it")
            if problem := damage(candidate, [pair for pair in tensors.items() if pair[0].startswith(GROUPS)]):
                raise Damaged(problem)
            yield candidate, tensors, described
        except FileNotFoundError as error:
            complain(f"the checkpoint {candidate} was skipped: {Path(error.filename).name} was not found")
        except Damaged as error:
            complain(f"the checkpoint {candidate} is damaged and was skipped: {error}")


def saved_in(folder: Path, suffix: str = "") -> list[Path]:
    """Returns the checkpoints in a folder, newest first. Copies that a user has made under other names are not listed.

    suffix: .part for unfinished ones, .old for replaced ones.
    """
    pattern = rf"step-\d{{8,}}{re.escape(suffix)}"
    return sorted((path for path in folder.glob("step-*") if re.fullmatch(pattern, path.name)), reverse=True)


def load_model(path: str, model, average=None, needs_statistics: bool = False) -> dict:
    """Gives a model the weights of the checkpoint that `newest` finds, and returns its description.

    average: as for `give`.
    """
    checkpoint, tensors, described = newest(path, needs_statistics)
    give(checkpoint, tensors, model, average)
    return described


def newest(path: str, needs_statistics: bool = False) -> tuple[Path, dict, dict]:
    """Returns (path, tensors, description) of the newest intact checkpoint. Raises UserError if there is none.

    needs_statistics: whether to skip checkpoints whose exact batch-norm statistics are not those of their weights (see
    `has_statistics`). Standard error names them.
    """
    skipped = []
    for checkpoint, tensors, described in intact(Path(path)):
        if needs_statistics and not has_statistics(described):
            skipped.append(checkpoint)
            continue
        if skipped:
            complain(f"{checkpoint} is used, because batch norm's statistics in {skipped[0]} are not those of its "
                     "weights: they are measured in evaluations, and it was saved between two of them")
        return checkpoint, tensors, described
    if skipped:
        raise UserError(f"--checkpoint: batch norm's statistics in {skipped[0]} are not those of its weights: they are "
                        "measured in evaluations, and it was saved before one; continue the training to the next one")
    raise UserError(NONE_READABLE.format(flag="--checkpoint", path=path))


def give(checkpoint: Path, tensors: dict, model, average=None, is_quiet: bool = False) -> None:
    """Gives a model the weights and the input normalization of a checkpoint. Raises UserError unless they fit.

    average: optim.average.WeightAverage that gets its weights, too, or None. is_quiet: whether standard error does not
    say that the normalization differs.
    """
    variables = model_variables(model) | named("ema", average.variables if average else [])
    groups = tuple({f"{name.partition('/')[0]}/" for name in variables})
    restore(checkpoint, {name: tensor for name, tensor in tensors.items() if name.startswith(groups)}, variables,
            is_quiet=is_quiet)


def initialize(path: str | None, model, classes: Sequence[str], average=None, file: str | None = None) -> None:
    """Starts a training from trained weights: those of the newest checkpoint in `path`, or their moving average.

    The input normalization comes with them. The last layer keeps its initial values if that run had other classes. If
    it had the same ones in another order, the layer is taken in the order here. Says on standard error what was taken.
    Raises UserError if another layer differs.

    path: None for weights of Keras: those in `file`, by default ImageNet's. classes: names in label order. average:
    optim.average.WeightAverage of the model, which restarts from these weights, or None.
    """
    if path is None:
        new = load_pretrained(model, file)
        loaded = len(model.variables) - sum(len(layer.weights) for layer in new)
        _say("pretrained_weights" if file else "pretrained", f"took {loaded} of {len(model.variables)} variables from "
             f"""{file or "ImageNet's weights of Keras"}; new: {', '.join(layer.name for layer in new)}""")
    else:
        checkpoint = next(intact(Path(path)), None)
        if not checkpoint:
            raise UserError(NONE_READABLE.format(flag="--init_checkpoint", path=path))
        _take(*checkpoint, model, classes)
    if average:
        average.restart()


def _take(checkpoint: Path, tensors: dict, described: dict, model, classes: Sequence[str]) -> None:
    """Gives a model the weights of another training, except those of the last layer if its classes are others."""
    ours, names = model_variables(model), described["classes"]
    averages = [tensors[name] for name in sorted(tensors) if name.startswith("ema/")]
    saved = {name: tensors[name] for name in sorted(tensors) if name.startswith(("model/", f"{INPUT}/"))}
    weights = [name for name in saved if name.startswith("model/")]
    saved |= zip(weights, averages or [saved[name] for name in weights], strict=True)
    last = {variable.ref() for variable in last_layer(model).variables}
    head = [name for name, variable in ours.items() if name in saved and variable.ref() in last]
    are_other = not same_classes(names, classes)
    new = [name for name in head if are_other or saved[name].shape != tuple(ours[name].shape)]
    if not are_other and names != [*classes]:
        saved |= {name: saved[name][..., labels_of(classes, names)] for name in head}
    restore(checkpoint, *({name: one for name, one in group.items() if name not in new} for group in (saved, ours)),
            "--init_checkpoint: ", "use the --model of that run; a model with dense layers before the last one also "
            "needs its --image_size")
    what, count = "moving averages" if averages else "variables", len(model.variables)
    _say("init_checkpoint", f"took {count - len(new)} of {count} {what} from {checkpoint} (epoch "
         f"{described['epoch']:g})")
    if new:
        fits = all(saved[name].shape == tuple(ours[name].shape) for name in new)
        shapes = (f"{name.split('/', 2)[-1]} {tuple(ours[name].shape)}"
                  + ("" if fits else f" instead of {saved[name].shape}") for name in new)
        _say("init_checkpoint", f"new: {', '.join(shapes)}"
             + (f", because {differing_classes(names, classes)}" if fits else ""))


def _say(what: str, line: str) -> None:
    print(f"{what}: {line}", file=sys.stderr, flush=True)


def restore(path: Path, tensors: Mapping, variables: Mapping[str, tf.Variable], *words: str, is_quiet: bool = False
            ) -> None:
    """Assigns the tensors of a checkpoint to variables by name. Raises UserError unless they fit.

    words: see check_fit. is_quiet: whether standard error does not say that the input normalization differs.
    """
    check_fit(path, tensors, variables, *words)
    if not is_quiet:
        note_normalization(path, tensors, variables)
    for name, variable in variables.items():
        variable.assign(tensors[name])


def has_statistics(described: dict) -> bool:
    """Whether the exact batch-norm statistics in a checkpoint were measured under its weights."""
    return described["progress"].get("statistics_step") == described["progress"]["step"]


def check_meaning(path: Path, described: dict) -> None:
    """Raises UserError for a checkpoint of another MEANING."""
    if (theirs := described.get("meaning", 1)) != MEANING:
        raise UserError(f"{path} belongs to a training in which flags have another meaning (version {theirs}, here "
                        f"{MEANING}; see CHANGELOG.md); continue it with the code that started it, or train anew in "
                        "another --output_dir")


def note_normalization(path: Path, tensors: dict, variables: dict) -> None:
    """Says on standard error that a checkpoint's input normalization, which is used, is not that of the dataset.

    variables: have the dataset's until the checkpoint is loaded. Means over other copies of the same images are alike.
    ImageNet's are used if the dataset's are not known, as in a folder of images.
    """
    for name in (name for name in variables if name.startswith(INPUT)):
        theirs, ours = tensors[name], variables[name].numpy()
        if not (np.allclose(theirs, ours, rtol=ALIKE, atol=ALIKE) or np.allclose(ours, (IMAGENET_MEAN, IMAGENET_STD))):
            (mean, std), (own_mean, own_std) = (
                [" ".join(f"{value:.4g}" for value in row) for row in numbers] for numbers in (theirs, ours))
            complain(f"pixels are normalized as in {path}, with mean {mean} and divisor {std}, not as in the dataset, "
                     f"with {own_mean} and {own_std}")


def same_classes(theirs: Sequence[str], ours: Sequence[str]) -> bool:
    """Whether two lists of class names are equal, or orders of the same names, each of which occurs once."""
    return [*theirs] == [*ours] or (len({*theirs}) == len(theirs) and sorted(theirs) == sorted(ours))


def differing_classes(theirs: Sequence[str], ours: Sequence[str]) -> str:
    """Returns how a checkpoint's class names differ from those of the dataset, or an empty text."""
    differing = [(label, *("missing" if name is None else repr(name) for name in pair))
                 for label, pair in enumerate(itertools.zip_longest(theirs, ours)) if pair[0] != pair[1]]
    if not differing:
        return ""
    label, there, here = differing[0]
    more = f", and {len(differing) - 1} more differ" if len(differing) > 1 else ""
    return f"class {label} is {there} in the checkpoint and {here} in the dataset{more}"


def labels_of(classes: Sequence[str], names: Sequence[str]) -> list[int]:
    """Returns the label that each of these classes has among the class names of a checkpoint."""
    labels = {name: label for label, name in enumerate(names)}
    return [labels[name] for name in classes]


def check_fit(path: Path, tensors: Mapping, variables: Mapping, flag: str = "",
              advice: str = "use the flags of that run") -> None:
    """Raises UserError, which names the first difference, unless names and shapes agree."""
    theirs, ours = ({name: str(tuple(one.shape)) for name, one in group.items()} for group in (tensors, variables))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise UserError(f"{flag}{path} does not fit this model and optimizer: {name} is "
                            f"{theirs.get(name, 'missing')} in the checkpoint and {ours.get(name, 'missing')} here; "
                            f"{advice}")
