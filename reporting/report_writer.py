"""Keeps report.html of a training up to date, without a cost for the training.

A thread of its own writes what the page needs: run.json, outcomes.json and samples.jpg. A process of its own draws the
page, so that neither Python's global lock nor a crash can disturb the training. A drawing that waits for an earlier one
is dropped when a newer one is due.
"""
import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common.errors import complain, one_line
from data.formats import FORMATS
from reporting.about import ROOT, about
from reporting.observer import Evaluation, Observer, RunInfo, Update
from reporting.outcomes import summarized
from reporting.run_folder import OUTCOMES, PAGE, RUN, SAMPLES, RunFolder

LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HOROVOD_", "SLURM_")  # the process that draws is no rank
PATIENCE = 60  # seconds for drawing
PICTURES, COLUMNS = 16, 8  # training images in samples.jpg, and those in a row
SMALL, LARGE = 64, 128  # pixels; images in samples.jpg are at least and at most so wide


class ReportWriter(Observer):
    """Writes report.html at the start, after each evaluation and at the end.

    training_images: returns so many training images after augmentation, uint8 (number, size, size, 3), of at most a
    given size in pixels; or None.
    """

    def __init__(self, files: RunFolder, training_images: Callable[[int, int], np.ndarray] | None = None):
        self._files, self._training_images, self._thread = files, training_images, ThreadPoolExecutor(1, "report")
        self._waiting, self._about, self._problem, self._is_drawn = Future(), {}, None, False

    def start(self, run: RunInfo) -> None:
        self._run = run
        self._thread.submit(self._guarded, self._begin)

    def step(self, update: Update) -> None:
        """Has the training images drawn, once the first step is compiled. Compiling would compete for Python."""
        if self._training_images:
            self._thread.submit(self._guarded, self._sample, self._training_images)
            self._training_images = None

    def evaluation(self, evaluation: Evaluation) -> None:
        self._waiting.cancel()
        self._waiting = self._thread.submit(self._guarded, self._record, evaluation)

    def rewind(self, progress) -> None:
        self._waiting.cancel()
        self._waiting = self._thread.submit(self._guarded, self._draw)

    def end(self, summary: dict) -> None:
        self._thread.submit(self._guarded, self._draw)

    def close(self) -> None:
        """Waits until the page is complete. An exception that ends the training is shown in it."""
        problem = sys.exception()
        if problem:
            self._waiting.cancel()
            self._thread.submit(self._guarded, self._record_stop, one_line(problem) or type(problem).__name__)
        self._thread.shutdown()
        if self._is_drawn and not problem:
            print(f"report: {self._files.path / PAGE}", file=sys.stderr)

    def _guarded(self, action, *arguments) -> None:
        """Runs an action on the thread. A failure is a line on standard error, and the next one only if it differs."""
        try:
            action(*arguments)
        except Exception as error:
            problem = one_line(error) or type(error).__name__
            if problem != self._problem:
                complain(f"{PAGE} could not be written: {problem}")
            self._problem = problem

    def _begin(self):
        self._about = about(self._run)
        self._files.write(RUN, self._about)
        self._draw()

    def _sample(self, images):
        if not (self._files.path / SAMPLES).exists():  # a resumed run has them
            with contextlib.suppress(Exception):  # the training reports what is wrong with its data
                self._files.write(SAMPLES, picture(images(PICTURES, LARGE)))

    def _record(self, evaluation: Evaluation):
        epoch, dataset = evaluation.row["epoch"], self._run.dataset
        if dataset.format in FORMATS:  # synthetic data has no classes to confuse
            self._files.write(OUTCOMES, summarized(evaluation.outcomes, dataset, epoch))
        if epoch < self._run.plan["epochs"]:  # the end follows, and draws
            self._draw()

    def _record_stop(self, reason: str):
        self._files.write(RUN, self._about | {"stopped": reason})
        self._draw()

    def _draw(self):
        self._is_drawn = False
        self._files.save()
        draw(self._files.path)
        self._is_drawn = True


def draw(folder: Path) -> None:
    """Draws a run's report.html in a process of its own. Raises OSError if that fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-m", "reporting.run_page", folder], cwd=ROOT, stdin=subprocess.DEVNULL, text=True,
            env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=PATIENCE,
            start_new_session=True)  # Ctrl-C stops the training, which then draws its last page
    except subprocess.TimeoutExpired:
        raise OSError(f"drawing takes longer than {PATIENCE} s") from None
    if done.returncode:
        raise OSError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])


def picture(images: np.ndarray) -> bytes:
    """Returns images as one JPEG. images: uint8 (number, height, width, 3)."""
    from PIL import Image

    side = images.shape[1]
    shown = max(side * (SMALL // side), SMALL) if side < SMALL else min(side, LARGE)
    joined = Image.new("RGB", (COLUMNS * shown, -(-len(images) // COLUMNS) * shown))
    for number, image in enumerate(images):
        small = Image.fromarray(image).resize((shown, shown), Image.NEAREST if side < SMALL else Image.BILINEAR)
        joined.paste(small, (number % COLUMNS * shown, number // COLUMNS * shown))
    saved = io.BytesIO()
    joined.save(saved, "JPEG", quality=88)
    return saved.getvalue()
