"""RUN/checkpoints: one folder per checkpoint, written atomically by rank 0 while training continues.

A checkpoint has TensorFlow's own format: `variables.index` and `variables.data-…`, with a checksum per tensor, so that
damage is detected. One of the tensors holds the training's progress. A checkpoint is written under a temporary name,
flushed to disk, and renamed. `best` links to the one with the highest validation top-1.
"""
import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tensorflow as tf

from common.errors import UserError, complain, one_line
from common.files import flush, write_atomically
from common.flags import defaults
from plan.settings import Recipe
from plan.values import same
from training.restoring import (
    DESCRIPTION,
    MEANING,
    Damaged,
    check_fit,
    check_meaning,
    describe,
    differing_classes,
    intact,
    note_normalization,
    saved_in,
)
from training.state import Progress, Snapshot

KEPT = 5
DEFAULTS = defaults(Recipe)  # for flags that earlier versions lacked


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
        listed = saved_in(folder)
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
        if any(saved_in(self._folder)):
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
        listed = saved_in(self._folder)
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
        listed = saved_in(self._folder)
        kept = [path for path in listed if path <= self.newest][:KEPT]
        best = max((path for path in listed if self._top1.get(path.name) is not None), default=None,
                   key=lambda path: self._top1[path.name])
        if best:
            link = self._folder / "best.part"
            link.unlink(missing_ok=True)
            link.symlink_to(best.name)
            link.replace(self._folder / "best")
        for path in [*listed, *saved_in(self._folder, ".part")]:
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


def _scratch(path) -> Path:
    return path.with_name(f"{path.name}.part")
