"""RUN/checkpoints: one folder per checkpoint, written atomically by rank 0 while training continues.

A checkpoint has TensorFlow's own format: `variables.index` and `variables.data-…`, with a checksum per tensor, so that
damage is detected. One of the tensors holds the training's progress. A checkpoint is written under a temporary name,
flushed to disk, and renamed. `best` links to the one with the highest validation top-1.
"""
import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tensorflow as tf

from common.errors import UserError, complain, one_line
from common.files import flush, write_atomically
from common.flags import defaults
from optim.schedules import same
from reporting.run_folder import CHECKPOINTS
from training.settings import Recipe
from training.state import Progress, Snapshot, named

KEPT = 5
# Raise it when a flag changes its meaning, or samples their order: a checkpoint of another version is not continued.
# 1 (checkpoints without a version): batch norm's moving statistics moved once per micro-batch, and the learning rate
# could change one step after the batch size at a fractional epoch. 2: LMDB and RecordIO were read file by file.
MEANING = 3
DEFAULTS = defaults(Recipe)  # for flags that earlier versions lacked
DESCRIPTION = "description"  # name of the tensor that holds, as JSON, everything except the variables


class Damaged(Exception):
    """Raised for a checkpoint that cannot be read."""


class Checkpoints:
    """The checkpoints of a run, on the rank that writes them.

    recipe: value of each flag that identifies the training. A checkpoint with another recipe is refused. flush: writes
    the rows that a checkpoint counts to disk, and is called before it is written.
    """

    def __init__(self, folder: Path, recipe: dict, flush: Callable[[], None] = lambda: None):
        self._folder, self._recipe, self._flush = folder, recipe, flush
        self._writer, self._writing = ThreadPoolExecutor(max_workers=1), None
        listed = _listed(folder)
        self.newest = listed[0] if listed else None
        self._top1 = {}  # by name, for checkpoints on disk that follow an evaluation
        for path in listed:
            with contextlib.suppress(Damaged):
                self._top1[path.name] = describe(path)["top1"]

    def load(self, variables: dict) -> Snapshot | None:
        """Returns the newest intact checkpoint, or None if there are none. Names damaged ones on standard error.

        variables: what the checkpoint has to fit. Raises UserError if it does not, or if all are damaged.
        """
        self.wait()
        for path, tensors, described in intact(self._folder):
            _check_meaning(path, described)
            self._check_recipe(path, described["recipe"])
            check_fit(path, tensors, variables)
            self.newest = path
            return Snapshot(tensors, Progress(**described["progress"]))
        if any(_listed(self._folder)):
            raise UserError(f"no checkpoint in {self._folder} can be read; start over with --resume=never")
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

    def last_good(self, step: int) -> Path | None:
        """Returns the path of the newest good checkpoint after a divergence at a step.

        A checkpoint from just before that step has the bad weights. It is deleted if there is an older one.
        """
        self.wait()
        listed = _listed(self._folder)
        if len(listed) > 1 and listed[0] == self._path(step):
            shutil.rmtree(listed.pop(0))
            self._top1.pop(self._path(step).name, None)
            self.newest = listed[0]
            self._tidy()
        return self.newest

    def _path(self, step) -> Path:
        return self._folder / f"step-{step:08}"

    def _write(self, snapshot, epoch, top1) -> bool:
        path = self._path(snapshot.progress.step)
        try:
            self._flush()
            write(path, snapshot, {"meaning": MEANING, "recipe": self._recipe, "epoch": epoch, "top1": top1})
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
    """Returns (tensors by name, description) of a checkpoint folder. Raises Damaged."""
    with _damage_known():
        reader = tf.train.load_checkpoint(str(path / "variables"))
        names = [name for name in reader.get_variable_to_shape_map() if name != DESCRIPTION]
        return {name: reader.get_tensor(name) for name in names}, json.loads(reader.get_tensor(DESCRIPTION))


def describe(path: Path) -> dict:
    """Returns the description in a checkpoint folder: everything except the variables. Raises Damaged."""
    with _damage_known():
        return json.loads(tf.train.load_checkpoint(str(path / "variables")).get_tensor(DESCRIPTION))


@contextlib.contextmanager
def _damage_known():
    try:
        yield
    except (tf.errors.OpError, ValueError, IndexError, RuntimeError, SystemError) as error:
        raise Damaged(one_line(error)[:200]) from None


def intact(path: Path) -> Iterator[tuple[Path, dict, dict]]:
    """Yields (path, tensors, description) of each intact checkpoint, newest first. Names damaged ones.

    path: a run's folder, its checkpoints/, or one checkpoint in it.
    """
    within = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    for candidate in [path] if (path / "variables.index").exists() else _listed(within):
        try:
            yield candidate, *read(candidate)
        except Damaged as error:
            complain(f"the checkpoint {candidate} is damaged and was skipped: {error}")


def load_model(path: str, model, average=None, needs_statistics: bool = False) -> dict:
    """Loads the newest checkpoint's weights into a model; returns its description. Raises UserError if there is none
    that fits.

    average: optim.average.WeightAverage to load, too, or None. needs_statistics: whether to skip checkpoints whose
    exact batch-norm statistics are not those of their weights (see `has_statistics`). Standard error names them.
    """
    skipped = []
    for found, tensors, described in intact(Path(path)):
        if needs_statistics and not has_statistics(described):
            skipped.append(found)
            continue
        variables = named("model", model.variables) | named("ema", average.variables if average else [])
        groups = ("model/", "ema/") if average else ("model/",)
        check_fit(found, {name: tensor for name, tensor in tensors.items() if name.startswith(groups)}, variables)
        for name, variable in variables.items():
            variable.assign(tensors[name])
        if skipped:
            complain(f"{found} is used, because batch norm's statistics in {skipped[0]} are not those of its weights: "
                     "they are measured in evaluations, and it was saved between two of them")
        return described
    if skipped:
        raise UserError(f"--checkpoint: batch norm's statistics in {skipped[0]} are not those of its weights: they are "
                        "measured in evaluations, and it was saved before one; continue the training to the next one")
    raise UserError(f"--checkpoint: {path} contains no readable checkpoint; give the folder RUN/checkpoints of "
                    "a training run")


def has_statistics(described: dict) -> bool:
    """Whether the exact batch-norm statistics in a checkpoint were measured under its weights."""
    return described["progress"].get("statistics_step") == described["progress"]["step"]


def _check_meaning(path: Path, described: dict) -> None:
    if (theirs := described.get("meaning", 1)) != MEANING:
        raise UserError(f"{path} belongs to a training in which flags have another meaning (version {theirs}, here "
                        f"{MEANING}; see CHANGELOG.md); continue it with the code that started it, or start over with "
                        "--resume=never")


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
