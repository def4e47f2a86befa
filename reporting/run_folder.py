"""The run's folder: plan.json, flags.txt, metrics.jsonl, times.jsonl and summary.json.

Training itself writes the summary.json of a run that diverged. It is removed if the run is continued.

times.jsonl has one row per evaluation: `epoch`, and the fractions of the time before it that went to `compute`, to
waiting for `data` and to the `exchange` of gradients. It is separate from metrics.jsonl, whose rows are the same, bit
for bit, in a resumed run.
"""
import json
import math

from common.files import as_json, write_atomically, write_json
from reporting.observer import Evaluation, Observer, RunInfo, Update


def write_grid(path, images) -> None:
    """Writes images, uint8 (number, height, width, 3), as one picture with about as many rows as columns."""
    import numpy as np
    from PIL import Image

    columns = math.ceil(math.sqrt(len(images)))
    filled = np.pad(images, [(0, -len(images) % columns), (0, 0), (0, 0), (0, 0)])
    rows = [np.concatenate(filled[start:start + columns], axis=1) for start in range(0, len(filled), columns)]
    Image.fromarray(np.concatenate(rows, axis=0)).save(path)


class RunFolder(Observer):
    """Writes the run's folder."""

    def start(self, run: RunInfo) -> None:
        self.folder = run.folder
        write_json(run.folder / "plan.json", run.plan)
        summary = run.folder / "summary.json"
        if summary.is_file() and json.loads(summary.read_text()).get("diverged"):
            summary.unlink()
        write_atomically(run.folder / "flags.txt", run.flags_text)
        self.rewind(run.progress)

    def rewind(self, progress) -> None:
        """Truncates the logs to this progress."""
        (self.folder / "metrics.jsonl").touch()
        self._cut("metrics.jsonl", progress.evaluations)
        self._cut("trust_ratios.jsonl", progress.evaluations + (progress.step > 0))
        self._cut("times.jsonl", progress.evaluations)

    def _cut(self, name, count):
        """Truncates a file to its first rows. The last line of the file may be incomplete."""
        path = self.folder / name
        if path.exists():
            write_atomically(path, "".join(path.read_text().splitlines(keepends=True)[:count]))

    def step(self, update: Update) -> None:
        """Logs the layers of the first update."""
        self._layers(0, update.layers)

    def evaluation(self, evaluation: Evaluation) -> None:
        row = evaluation.row
        self._append("metrics.jsonl", row)
        self._append("times.jsonl", {"epoch": row["epoch"], **evaluation.breakdown})
        self._layers(row["epoch"], evaluation.layers)

    def _layers(self, epoch, layers):
        if layers:
            self._append("trust_ratios.jsonl", {"epoch": epoch, "layers": layers})

    def _append(self, name, row):
        with open(self.folder / name, "a") as file:
            file.write(as_json(row) + "\n")

    def end(self, summary: dict) -> None:
        write_json(self.folder / "summary.json", summary)
