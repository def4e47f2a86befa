"""RUN/checkpoints: one folder per checkpoint, written atomically by rank 0 while training continues.

A checkpoint has TensorFlow's own format: `variables.index` and `variables.data-…`, with a checksum per tensor, so that
damage is detected. One of the tensors holds the training's progress. A checkpoint is written under a temporary name,
flushed to disk, and renamed. `best` leads to the one of the best evaluation so far, whose outcomes it holds. That is
saved even if no checkpoint is due, as an extra one, which is removed when there is a better one.
"""
import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tensorflow as tf

from common.errors import UserError, complain, full_disk, one_line
from common.files import flush, link, replace, write_atomically
from common.flags import defaults
from plan.output_dir import from_weights
from plan.settings import Recipe
from plan.values import same
from training.outcomes import Outcomes
from training.restoring import (
    DESCRIPTION,
    MEANING,
    OUTCOMES,
    Damaged,
    best_outcomes,
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
        self._unwritten = []  # arguments of _write for the best evaluation, until it is on disk
        self._described = {}  # by name, for checkpoints on disk
        for path in listed:
            with contextlib.suppress(Damaged, OSError):
                self._described[path.name] = describe(path)

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
        """Raises UserError for a checkpoint of another recipe. recorded: the recipe in it.

        plan.output_dir.check compares flags.txt before that, without TensorFlow.
        """
        for name in sorted(self._recipe.keys() | recorded.keys()):
            ours, theirs = self._recipe.get(name), recorded.get(name, DEFAULTS.get(name))
            if not same(ours, theirs):
                instead = from_weights(path.parents[1]) if name == "train_samples" else "choose another --output_dir"
                raise UserError(f"{path} is a checkpoint of another training: {name} was {theirs} and is now {ours}; "
                                f"{instead}, or start over with --resume=never")

    def save(self, snapshot: Snapshot, epoch: float, top1: float | None = None, outcomes: Outcomes | None = None
             ) -> None:
        """Waits for the previous write, then starts to write a snapshot.

        top1, outcomes: of the evaluation just made, if any.
        """
        self.wait()
        best = snapshot.progress.best
        if best and (best["epoch"], best["top1"]) == (epoch, top1):
            self.save_best(snapshot, epoch, top1, outcomes, is_extra=False)
        else:
            self._writer.submit(self._write_best)
            self._writing = self._writer.submit(self._write, snapshot, epoch, top1)

    def save_best(self, snapshot: Snapshot, epoch: float, top1: float, outcomes: Outcomes | None = None,
                  is_extra: bool = True) -> None:
        """Writes a snapshot of the best evaluation so far as soon as the disk is free. Training does not wait for that.

        One snapshot at most waits in memory: a better one replaces it. If it cannot be written, it is tried again
        before the next one. is_extra: whether no checkpoint is due.
        """
        self._unwritten = [(snapshot, epoch, top1, outcomes, is_extra)]
        self._writing = self._writer.submit(self._write_best)

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
        self._unwritten = []
        listed = saved_in(self._folder)
        if step is not None and len(listed) > 1 and listed[0] == self._path(step):
            self._described.pop(listed[0].name, None)
            shutil.rmtree(listed.pop(0))
            self.newest = listed[0]
            self._tidy()
        return self.newest

    def of(self, evaluation: dict | None) -> Path | None:
        """Returns the checkpoint on disk that follows an evaluation: epoch, top1. None if there is none."""
        return next((path for path in saved_in(self._folder) if evaluation and all(
            self._about(path).get(key) == evaluation[key] for key in ("epoch", "top1"))), None)

    def _about(self, path) -> dict:
        return self._described.get(path.name, {})

    def _best(self) -> Path | None:
        """Returns the checkpoint of the best evaluation up to the newest checkpoint, or None if it is not on disk."""
        records = self._about(self.newest).get("progress", {}).get("records")
        return self.of(records[-1]) if records else None

    def _path(self, step) -> Path:
        return self._folder / f"step-{step:08}"

    def _write_best(self) -> bool:
        unwritten = self._unwritten  # save_best may replace the list meanwhile
        if unwritten and not self._write(*unwritten[0]):
            return False
        unwritten.clear()
        return True

    def _write(self, snapshot, epoch, top1, outcomes=None, is_extra=False) -> bool:
        path = self._path(snapshot.progress.step)
        described = {"meaning": MEANING, "recipe": self._recipe, "classes": self._classes, "epoch": epoch, "top1": top1,
                     "is_extra": is_extra, "progress": dataclasses.asdict(snapshot.progress)}
        before = self._about(path)
        if top1 is None and before and before["progress"]["evaluations"] == snapshot.progress.evaluations:
            described |= {"epoch": before["epoch"], "top1": before["top1"]}  # the same state, after its evaluation
            outcomes = best_outcomes(self._folder.parent, described)
        try:
            self._flush()
            write(path, snapshot.tensors | ({OUTCOMES: tf.stack(outcomes)} if outcomes else {}), described)
        except (OSError, tf.errors.OpError) as error:
            shutil.rmtree(_scratch(path), ignore_errors=True)
            if self.newest and full_disk(error) and any(self._remove_old(kept) for kept in reversed(range(KEPT))):
                return self._write(snapshot, epoch, top1, outcomes, is_extra)
            stands = f"the newest checkpoint is {self.newest.name}" if self.newest else "there is no earlier one"
            complain(f"the checkpoint {path} could not be written: {one_line(error)[:200]}; {stands}")
            return False
        self._described[path.name] = described
        self.newest = path
        try:
            self._tidy()
        except OSError as error:
            complain(f"{path} is written, but `best` and `checkpoint` may lead to earlier ones: {one_line(error)}")
        return True

    def _tidy(self) -> None:
        """Updates `checkpoint`, which TensorFlow reads, and `best`; removes old, leftover and unfinished ones."""
        write_atomically(self._folder / "checkpoint", f'model_checkpoint_path: "{self.newest.name}/variables"\n')
        if best := self._best():
            link(self._folder / "best", best.name)
        else:
            (self._folder / "best").unlink(missing_ok=True)
        self._remove_old(KEPT)

    def _remove_old(self, kept: int) -> bool:
        """Removes all but so many of those that were due, the newest and the best. Returns whether it removed any.

        The best is that of the best evaluation. If it is not on disk, it is the best that is.
        """
        listed = saved_in(self._folder)
        due = [path for path in listed if path <= self.newest and not self._about(path).get("is_extra")]
        scored = [path for path in listed if self._about(path).get("top1") is not None]
        best = self._best() or max(scored, default=None, key=lambda path: self._about(path)["top1"])
        old = [path for path in listed if path not in (*due[:kept], self.newest, best)]
        for path in (*old, *saved_in(self._folder, ".part"), *saved_in(self._folder, ".old")):
            shutil.rmtree(path, ignore_errors=True)
            self._described.pop(path.name, None)
        return not all(path.exists() for path in old)


def write(path: Path, tensors: dict, described: dict) -> None:
    """Writes a checkpoint folder atomically. Raises OSError or tf.errors.OpError."""
    scratch = _scratch(path)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    tensors = tensors | {DESCRIPTION: tf.constant(json.dumps(described))}
    tf.raw_ops.SaveV2(prefix=str(scratch / "variables"), tensor_names=list(tensors), tensors=list(tensors.values()),
                      shape_and_slices=[""] * len(tensors))
    for written in (*scratch.iterdir(), scratch):
        flush(written)
    replace(scratch, path)  # an earlier one there is damaged, or from before a rollback
    flush(path.parent)


def _scratch(path) -> Path:
    return path.with_name(f"{path.name}.part")
