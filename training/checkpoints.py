"""RUN/checkpoints: one folder per checkpoint, written atomically by rank 0 while training continues.

A checkpoint has TensorFlow's own format: `variables.index` and `variables.data-…`, with a checksum per tensor, so that
damage is detected. One of the tensors holds the training's progress. A checkpoint is written under a temporary name,
flushed to disk, and renamed. `best` links to the one with the highest validation top-1.
"""
import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorflow as tf

from common.errors import UserError, complain, one_line
from common.files import flush, write_atomically
from common.flags import defaults
from plan.run_folder import CHECKPOINTS
from plan.settings import Recipe
from plan.values import same
from training.state import INPUT, Progress, Snapshot, model_variables, named

KEPT = 5
# Raise it when a flag changes its meaning, or samples their order: a checkpoint of another version is not continued.
# 1 (checkpoints without a version): batch norm's moving statistics moved once per micro-batch, and the learning rate
# could change one step after the batch size at a fractional epoch. 2: LMDB and RecordIO were read file by file. 3:
# mixing and brightness had the same random numbers, and so had augmentation and the order of epochs 1 to 3.
MEANING = 4
DEFAULTS = defaults(Recipe)  # for flags that earlier versions lacked
ALIKE = 0.01  # relative difference of two means over the same images, at most
DESCRIPTION = "description"  # name of the tensor that holds, as JSON, everything except the variables
FILES = "variables.index", "variables.data-00000-of-00001"


class Damaged(Exception):
    """Raised for a checkpoint whose files can be opened, but not read."""


class Checkpoints:
    """The checkpoints of a run, on the rank that writes them.

    recipe: value of each flag that identifies the training. A checkpoint with another recipe is refused. flush: writes
    the rows that a checkpoint counts to disk, and is called before it is written. classes: names in label order. A
    checkpoint with others is refused.
    """

    def __init__(self, folder: Path, recipe: dict, flush: Callable[[], None] = lambda: None,
                 classes: Sequence[str] = ()):
        self._folder = folder
        self._recipe = recipe
        self._flush = flush
        self._classes = [*classes]
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._writing = None
        listed = _listed(folder)
        self.newest = listed[0] if listed else None
        self._top1 = {}  # by name, for checkpoints on disk that follow an evaluation
        for path in listed:
            with contextlib.suppress(Damaged, OSError):
                self._top1[path.name] = describe(path)["top1"]

    def load(self, variables: dict) -> Snapshot | None:
        """Returns the newest intact checkpoint, or None if there are none. Names damaged ones on standard error.

        variables: what the checkpoint has to fit. Raises UserError if it does not, or if none can be read, and OSError
        if it cannot be opened.
        """
        self.wait()
        for path, tensors, described in intact(self._folder):
            check_meaning(path, described)
            self._check_recipe(path, described["recipe"])
            if difference := differing_classes(described["classes"], self._classes):
                raise UserError(f"{path} is a checkpoint of another training: {difference}; choose another "
                                "--output_dir, or start over with --resume=never")
            check_fit(path, tensors, variables)
            note_normalization(path, tensors, variables)
            self.newest = path
            return Snapshot(tensors, Progress(**described["progress"]))
        if any(_listed(self._folder)):
            raise UserError(f"no checkpoint in {self._folder} can be read; choose another --output_dir, or restore the "
                            "files from a copy")
        return None

    def _check_recipe(self, path, recorded):
        for name in sorted(self._recipe.keys() | recorded.keys()):
            ours, theirs = self._recipe.get(name), recorded.get(name, DEFAULTS.get(name))
            if not same(ours, theirs):
                raise UserError(f"{path} is a checkpoint of another training: {name} was {theirs} and is now {ours}; "
                                "choose another --output_dir, or start over with --resume=never")

    def save(self, snapshot: Snapshot, epoch: float, top1: float | None = None) -> None:
        """Waits for the previous write, then starts to write a snapshot. top1: of the evaluation just made, if any."""
        self.wait()
        self._writing = self._writer.submit(self._write, snapshot, epoch, top1)

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def wait(self) -> bool:
        """Waits until all is written. Returns False if the last write failed, which is reported on standard error."""
        return self._writing is None or self._writing.result()

    def last_good(self, step: int | None) -> Path | None:
        """Returns the path of the newest good checkpoint after a divergence at a step, or the newest for None.

        A checkpoint from just before that step has the bad weights. It is deleted if there is an older one.
        """
        self.wait()
        listed = _listed(self._folder)
        if step is not None and len(listed) > 1 and listed[0] == self._path(step):
            self._top1.pop(listed[0].name, None)
            shutil.rmtree(listed.pop(0))
            self.newest = listed[0]
            self._tidy()
        return self.newest

    def _path(self, step) -> Path:
        return self._folder / f"step-{step:08}"

    def _write(self, snapshot, epoch, top1) -> bool:
        path = self._path(snapshot.progress.step)
        try:
            self._flush()
            write(path, snapshot, {"meaning": MEANING, "recipe": self._recipe, "classes": self._classes, "epoch": epoch,
                                   "top1": top1})
            self._top1[path.name] = top1
            self.newest = path
            self._tidy()
            return True
        except (OSError, tf.errors.OpError) as error:
            shutil.rmtree(_scratch(path), ignore_errors=True)
            stands = f"the newest checkpoint is {self.newest.name}" if self.newest else "there is no earlier one"
            complain(f"the checkpoint {path} could not be written: {one_line(error)[:200]}; {stands}")
            return False

    def _tidy(self) -> None:
        """Updates `checkpoint`, which TensorFlow reads, and `best`; removes old, leftover and unfinished ones."""
        write_atomically(self._folder / "checkpoint", f'model_checkpoint_path: "{self.newest.name}/variables"\n')
        listed = _listed(self._folder)
        kept = [path for path in listed if path <= self.newest][:KEPT]
        best = max((path for path in listed if self._top1.get(path.name) is not None), default=None,
                   key=lambda path: self._top1[path.name])
        if best:
            link = self._folder / "best.part"
            link.unlink(missing_ok=True)
            link.symlink_to(best.name)
            link.replace(self._folder / "best")
        for path in [*listed, *_listed(self._folder, ".part")]:
            if path not in (*kept, best):
                shutil.rmtree(path, ignore_errors=True)


def write(path: Path, snapshot: Snapshot, about: dict) -> None:
    """Writes a checkpoint folder atomically. Raises OSError or tf.errors.OpError."""
    scratch = _scratch(path)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    described = about | {"progress": dataclasses.asdict(snapshot.progress)}
    tensors = snapshot.tensors | {DESCRIPTION: tf.constant(json.dumps(described))}
    tf.raw_ops.SaveV2(prefix=str(scratch / "variables"), tensor_names=list(tensors), tensors=list(tensors.values()),
                      shape_and_slices=[""] * len(tensors))
    for written in (*scratch.iterdir(), scratch):
        flush(written)
    shutil.rmtree(path, ignore_errors=True)  # damaged, or from before a rollback
    scratch.rename(path)
    flush(path.parent)


def read(path: Path) -> tuple[dict, dict]:
    """Returns (tensors by name, description) of a checkpoint folder. Raises Damaged, and OSError as `_opened`."""
    with _opened(path) as reader:
        names = [name for name in reader.get_variable_to_shape_map() if name != DESCRIPTION]
        return {name: reader.get_tensor(name) for name in names}, json.loads(reader.get_tensor(DESCRIPTION))


def describe(path: Path) -> dict:
    """Returns the description in a checkpoint folder: everything except the variables. Raises as `read`."""
    with _opened(path) as reader:
        return json.loads(reader.get_tensor(DESCRIPTION))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator:
    """Context manager for TensorFlow's reader of a checkpoint. Raises Damaged, and OSError if a file cannot be opened.

    TensorFlow takes a path for a pattern, in which [ and \\ are special. So the reader gets the folder's descriptor.
    """
    for name in FILES:
        open(path / name, "rb").close()
    descriptor = os.open(path, os.O_RDONLY)
    folder = f"/proc/self/fd/{descriptor}"
    try:
        yield tf.train.load_checkpoint(f"{folder}/variables")
    except (tf.errors.OpError, ValueError, IndexError, RuntimeError, SystemError) as error:
        raise Damaged(one_line(error).replace(folder, str(path))[:200]) from None
    finally:
        os.close(descriptor)


def intact(path: Path) -> Iterator[tuple[Path, dict, dict]]:
    """Yields (path, tensors, description) of each intact checkpoint, newest first. Names damaged and incomplete ones.

    path: a run's folder, its checkpoints/, or one checkpoint in it. Raises OSError for one that cannot be opened, which
    may be intact and newer than the next.
    """
    within = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    for candidate in [path] if (path / "variables.index").exists() else _listed(within):
        try:
            yield candidate, *read(candidate)
        except FileNotFoundError as error:
            complain(f"the checkpoint {candidate} was skipped: {Path(error.filename).name} was not found")
        except Damaged as error:
            complain(f"the checkpoint {candidate} is damaged and was skipped: {error}")


def load_model(path: str, model, average=None, needs_statistics: bool = False, classes: Sequence[str] = (),
               is_quiet: bool = False) -> dict:
    """Loads the newest checkpoint's weights and input normalization into a model; returns its description.

    Raises UserError if there is none that fits.

    average: optim.average.WeightAverage to load, too, or None. needs_statistics: whether to skip checkpoints whose
    exact batch-norm statistics are not those of their weights (see `has_statistics`). Standard error names them.
    classes: names that the checkpoint has to have, in any order, or empty. is_quiet: whether standard error does not
    say that the normalization differs.
    """
    skipped = []
    for checkpoint, tensors, described in intact(Path(path)):
        if needs_statistics and not has_statistics(described):
            skipped.append(checkpoint)
            continue
        names = described.get("classes", [])
        if classes and names and not same_classes(names, classes):
            raise UserError(f"--data_dir: {differing_classes(names, classes)}; evaluate on a dataset with the classes "
                            f"of {checkpoint}")
        variables = model_variables(model) | named("ema", average.variables if average else [])
        variables = {name: one for name, one in variables.items()  # earlier checkpoints lack the normalization
                     if name in tensors or not name.startswith(INPUT)}
        groups = ("model/", f"{INPUT}/", *(["ema/"] if average else []))
        check_fit(checkpoint, {name: tensor for name, tensor in tensors.items() if name.startswith(groups)}, variables)
        if not is_quiet:
            note_normalization(checkpoint, tensors, variables)
        for name, variable in variables.items():
            variable.assign(tensors[name])
        if skipped:
            complain(f"{checkpoint} is used, because batch norm's statistics in {skipped[0]} are not those of its "
                     "weights: they are measured in evaluations, and it was saved between two of them")
        return described
    if skipped:
        raise UserError(f"--checkpoint: batch norm's statistics in {skipped[0]} are not those of its weights: they are "
                        "measured in evaluations, and it was saved before one; continue the training to the next one")
    raise UserError(f"--checkpoint: {path} contains no readable checkpoint; give the folder RUN/checkpoints of "
                    "a training run")


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
    """
    for name in (name for name in variables if name.startswith(INPUT)):
        theirs, ours = tensors[name], variables[name].numpy()
        if not np.allclose(theirs, ours, rtol=ALIKE, atol=ALIKE):
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


def check_fit(path: Path, tensors: dict, variables: dict) -> None:
    """Raises UserError, which names the first difference, unless names and shapes agree."""
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    ours = {name: tuple(variable.shape) for name, variable in variables.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise UserError(f"{path} does not fit this model and optimizer: {name} is {theirs.get(name, 'missing')} in "
                            f"the checkpoint and {ours.get(name, 'missing')} here; use the flags of that run")


def _listed(folder: Path, suffix: str = "") -> list[Path]:
    """Returns the checkpoints in a folder, newest first. Copies that a user has made under other names are not listed.

    suffix: .part for unfinished ones.
    """
    pattern = rf"step-\d{{8,}}{re.escape(suffix)}"
    return sorted((path for path in folder.glob("step-*") if re.fullmatch(pattern, path.name)), reverse=True)


def _scratch(path) -> Path:
    return path.with_name(f"{path.name}.part")
