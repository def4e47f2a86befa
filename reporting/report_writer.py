"""Keeps report.html of a training up to date, from a thread.

The thread writes classes.csv and predictions.csv of the best evaluation and what the page needs (run.json,
outcomes.json and samples.jpg), and draws the page.
Training may wait meanwhile for Python's global lock. The thread therefore draws at most once in 10 s, and for at most
1 % of a core's time.
"""
import contextlib
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from PIL import Image

from common.errors import complain, one_line
from common.run_folder import (
    CLASSES,
    COLUMNS,
    OUTCOMES,
    PAGE,
    PREDICTIONS,
    ROWS,
    RUN,
    SAMPLE_IMAGES,
    RunFolder,
    top1_of,
)
from common.streams import Errors
from reporting.about import about
from reporting.outcomes import outcomes_json
from reporting.pictures import encoded, joined
from reporting.progress import ProgressDisplay
from reporting.report import write_report
from training.by_class import as_csv, by_class
from training.observer import Evaluation, Observer, RunInfo, Update
from training.outcomes import predictions_csv
from training.restoring import best_outcomes

EVERY = 10  # seconds, at least, between two drawings, and twice as many between two without an evaluation
SHARE = 0.01  # of the time, at most, in which a core draws
SMALL, LARGE = 64, 128  # pixels; smallest and largest width of an image in samples.jpg


class ReportWriter(Observer):
    """Writes report.html at the start, while training goes on, after evaluations and at the end."""

    def __init__(self, files: RunFolder, display: ProgressDisplay | None = None):
        """display: its forecast of the time left is shown."""
        self._files = files
        self._display = display
        self._thread = ThreadPoolExecutor(1, "report")
        self._waiting = Future()  # the drawing that begins when the thread is free
        self._waiting.set_result(None)
        self._due = time.monotonic()  # when the next drawing may begin
        self._is_ending = threading.Event()
        self._about = {}
        self._best = self._unwritten = None  # epoch and top1 of the best evaluation; its outcomes, until written
        self._seconds_left = self._names = None
        self._problem = None
        self._is_drawn = False

    def start(self, run: RunInfo) -> None:
        self._run, self._best = run, run.progress.best
        self._images_are_due = run.images is not None
        self._submit(self._begin)

    def step(self, update: Update) -> None:
        """Has the page drawn from time to time, and after the first step the training images.

        They are not made before that step, because its compilation needs Python's global lock, too.
        """
        if self._images_are_due:
            self._submit(self._sample)
            self._images_are_due = False
        elif self._waiting.done() and time.monotonic() >= self._due + EVERY:
            self._seconds_left = self._display and self._display.seconds_left
            self._update()

    def evaluation(self, evaluation: Evaluation) -> None:
        top1 = top1_of(evaluation.row)
        if not self._best or top1 > self._best["top1"]:
            self._best, self._unwritten = {"epoch": evaluation.row["epoch"], "top1": top1}, evaluation.outcomes
        self._seconds_left = self._display and self._display.seconds_left
        self._update()

    def rewind(self, progress) -> None:
        self._best, self._unwritten = progress.best, None
        self._update()

    def end(self, summary: dict) -> None:
        self._is_ending.set()
        self._update()

    def close(self) -> None:
        """Waits for the last drawing. After an exception, the page says why the training ended."""
        self._is_ending.set()
        problem = sys.exception()
        if problem:
            self._waiting.cancel()
            following = getattr(problem, "next_workers", None)
            self._submit(self._record_stop, one_line(problem) or type(problem).__name__, following)
        self._thread.shutdown()
        if self._is_drawn:
            print(f"report: {self._files.path / PAGE}", file=sys.stderr)

    def _update(self):
        """Has the page drawn. Cancels a drawing that has not begun, because the new one shows all."""
        self._waiting.cancel()
        self._waiting = self._submit(self._draw_when_due)

    def _submit(self, action, *arguments) -> Future:
        return self._thread.submit(self._guarded, action, *arguments)

    def _guarded(self, action, *arguments, written: str = PAGE) -> None:
        """Runs an action on the thread. Prints an error in one line, unless it repeats the last one."""
        try:
            action(*arguments)
        except Exception as error:
            problem = one_line(error) or type(error).__name__
            if problem != self._problem:
                complain(f"{written} could not be written: {problem}")
            self._problem = problem

    def _begin(self):
        self._about = about(self._run) | {"sample_classes": self._files.read(RUN).get("sample_classes")}
        self._draw()

    def _sample(self):
        if not (self._files.path / SAMPLE_IMAGES).exists():  # a resumed run has them
            with contextlib.suppress(Exception):  # the training reports what is wrong with its data
                pictures, names = self._run.images(COLUMNS * ROWS, LARGE)
                self._files.write(SAMPLE_IMAGES, picture(pictures))
                self._about["sample_classes"] = names
            self._draw()

    def _record_stop(self, reason: str, next_workers: int | None):
        self._about |= {"stopped": reason} | ({"next_workers": next_workers} if next_workers else {})
        self._draw()

    def _draw_when_due(self):
        self._is_ending.wait(self._due - time.monotonic())
        began = time.thread_time()
        self._draw()
        self._due = time.monotonic() + max(EVERY, (time.thread_time() - began) / SHARE)

    def _draw(self):
        self._is_drawn = False
        self._guarded(self._record_outcomes, written=OUTCOMES)  # without it, the page still says how the run ended
        if Errors.problem:
            self._about["standard_error"] = f"partly lost: {Errors.problem}"
        self._files.write(RUN, self._about | ({"seconds_left": self._seconds_left} if self._seconds_left else {}))
        self._files.save()
        write_report(self._files.path)
        self._is_drawn = True

    def _record_outcomes(self):
        """Writes the figures of the best evaluation. A rollback or a resume may have led back to an earlier one."""
        best, found, dataset = self._best, self._unwritten, self._run.dataset
        if dataset.is_synthetic:  # which has no classes to confuse
            return
        if not found and best and self._files.read(OUTCOMES).get("epoch") == best["epoch"]:
            return
        found = found or best_outcomes(self._files.path, best)
        if found:
            self._files.write(CLASSES, as_csv(by_class(*found.pairs, dataset.classes)))
            self._files.write(OUTCOMES, outcomes_json(found, dataset, best["epoch"]))
            names = self._names = self._names or dataset.validation.names()
            self._files.write(PREDICTIONS, predictions_csv(found, found.guesses, names, dataset.classes))
        else:
            for name in (CLASSES, OUTCOMES, PREDICTIONS):
                self._files.remove(name)
        if self._unwritten is found:
            self._unwritten = None


def picture(images: np.ndarray) -> bytes:
    """Returns images as one JPEG. images: uint8 (number, height, width, 3)."""
    side = images.shape[1]
    shown = max(side * (SMALL // side), SMALL) if side < SMALL else min(side, LARGE)
    resampling = Image.Resampling.NEAREST if side < SMALL else Image.Resampling.BILINEAR
    resized = [np.asarray(Image.fromarray(image).resize((shown, shown), resampling)) for image in images]
    return encoded(joined(np.stack(resized), COLUMNS), "JPEG", quality=88)
