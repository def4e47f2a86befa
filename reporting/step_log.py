"""steps.jsonl: what single updates did. The report's curves between two evaluations, and its "as run", come from it."""
import json
import time

from common.files import as_json, write_atomically
from reporting.observer import Evaluation, Observer, RunInfo, Update

ROWS = 1000  # about so many in a whole training


class StepLog(Observer):
    """Writes a row for every n-th update: step, epoch, seconds, learning_rate, momentum, batch_size, loss, top1.

    The rows are written after an evaluation and at the end of the process.
    """

    def start(self, run: RunInfo) -> None:
        self._path, self._every = run.folder / "steps.jsonl", -(-run.plan["steps"] // ROWS)
        self._began, self._lines = time.perf_counter() - run.progress.seconds, []
        self.rewind(run.progress)

    def rewind(self, progress) -> None:
        """Removes the steps from this progress on. The last line of the file may be incomplete."""
        lines = (self._path.read_text() if self._path.exists() else "").splitlines(keepends=True) + self._lines
        self._lines = []
        write_atomically(self._path, "".join(line for line in lines if line.endswith("\n")
                                             and json.loads(line)["step"] < progress.step))

    def step(self, update: Update) -> None:
        if update.number % self._every == 0:
            self._lines.append(as_json({
                "step": update.number, "epoch": update.epoch, "seconds": time.perf_counter() - self._began,
                "learning_rate": update.learning_rate, "momentum": update.momentum, "batch_size": update.batch_size,
                "loss": update.loss, "top1": update.top1}) + "\n")

    def evaluation(self, evaluation: Evaluation) -> None:
        with open(self._path, "a") as file:
            file.writelines(self._lines)
        self._lines = []

    def close(self) -> None:
        self.evaluation(None)
