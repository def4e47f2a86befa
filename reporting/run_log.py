"""What records and shows a training, on rank 0: the observers of every run, and those that write to its folder."""
import contextlib
import math
import sys
import time

from common.errors import Stopped, complain
from common.run_folder import AUGMENTATIONS, FLAGS, LAYERS, LOGS, METRICS, NOISE, PLAN, STEPS, SUMMARY, TIMES, RunFolder
from plan.settings import Run
from reporting.pictures import encoded, joined
from reporting.progress import ProgressDisplay
from reporting.report_writer import ReportWriter
from reporting.tensorboard import TensorBoard
from training.observer import Evaluation, Observer, RunInfo, Update

STEP_ROWS = 1000  # about so many rows of steps.jsonl in a whole training
MOST_IMAGES = 64  # images of augmentations.png
LARGEST = 4096  # pixels, their largest size


def observers_of(run: Run, folder: RunFolder) -> list[Observer]:
    """Returns the observers of a run that writes to a folder, in the order in which they are called.

    Those that read what others write to the folder come last.
    """
    display = ProgressDisplay()
    return [RunLog(folder), display, *([Augmentations(folder)] if run.save_augmentations else []),
            TensorBoard(folder), ReportWriter(folder, display)]


class RunLog(Observer):
    """Writes plan.json, flags.txt, summary.json and the logs. They are saved after an evaluation and at the end.

    A row of steps.jsonl is written for every n-th update: step, epoch, seconds, learning_rate, momentum, batch_size,
    loss, top1. Training itself writes the summary.json of a run that diverged. It is removed if the run is continued.
    """

    def __init__(self, files: RunFolder):
        self._files = files

    def start(self, run: RunInfo) -> None:
        self._began = time.perf_counter() - run.progress.seconds
        self._every = -(-run.plan["steps"] // STEP_ROWS)
        with contextlib.suppress(OSError):
            (run.folder / METRICS).touch()  # a training that ends before its first evaluation has no rows
        self._files.write(PLAN, run.plan)
        self._files.write(FLAGS, run.flags_text)
        ending = self._files.ending()
        if not ending or ending.get("diverged"):  # or it is damaged, or an evaluation's
            self._files.remove(SUMMARY)
        self.rewind(run.progress)

    def rewind(self, progress) -> None:
        """Removes the rows after this progress."""
        def is_before(row):
            if "step" in row:
                return row["step"] < progress.step
            return progress.step and row["samples"] <= progress.evaluated

        self._newest = None  # the row of the newest update, unless it is logged
        for name in LOGS:
            self._files.keep(name, is_before)
        if (lacking := progress.evaluations - len(self._files.rows(METRICS))) > 0:
            complain(f"warning: {self._files.path / METRICS} lacks {lacking} of the {progress.evaluations} evaluations "
                     "before this checkpoint; training continues without them")
        self._files.save()

    def step(self, update: Update) -> None:
        """Logs the update, and the layers of the first one, after which the run that this one replaces is deleted."""
        if not update.number:
            self._files.forget()
        self._layers({"epoch": 0, "samples": 0}, update.layers)
        self._newest = {
            "step": update.number, "epoch": update.epoch, "seconds": time.perf_counter() - self._began,
            "learning_rate": update.learning_rate, "momentum": update.momentum, "batch_size": update.batch_size,
            "loss": update.loss, "top1": update.top1}
        if update.number % self._every == 0:
            self._log_newest()

    def _log_newest(self):
        if self._newest:
            self._files.append(STEPS, self._newest)
        self._newest = None

    def evaluation(self, evaluation: Evaluation) -> None:
        row = evaluation.row
        when = {"epoch": row["epoch"], "samples": row["samples"]}
        self._files.append(METRICS, row)
        several = {"hosts": evaluation.hosts, "workers": evaluation.workers, "slow": evaluation.slow}
        self._files.append(TIMES, when | evaluation.breakdown | (
            several if len(evaluation.hosts) > 1 and evaluation.breakdown else {}))
        self._layers(when, evaluation.layers)
        if evaluation.noise:
            self._files.append(NOISE, when | {"batch_size": row["batch_size"]} | evaluation.noise)
        self._files.save()

    def _layers(self, when, layers):
        if layers:
            self._files.append(LAYERS, when | {"layers": layers})

    def end(self, summary: dict) -> None:
        self._files.write(SUMMARY, summary)
        self._files.save()

    def close(self) -> None:
        """Saves the logs, after a divergence or another error with the last update."""
        if isinstance(sys.exception(), Exception) and not isinstance(sys.exception(), Stopped):
            self._log_newest()
        self._files.save()


class Augmentations(Observer):
    """--save_augmentations: writes augmentations.png, training images as the model sees them."""

    def __init__(self, folder: RunFolder):
        self._folder = folder

    def start(self, run: RunInfo) -> None:
        if run.images:
            images, _ = run.images(MOST_IMAGES, LARGEST)
            picture = joined(images, math.ceil(math.sqrt(len(images))))
            self._folder.write(AUGMENTATIONS, encoded(picture, "PNG"))
            self._folder.save()
