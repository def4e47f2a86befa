"""The run's folder: plan.json, flags.txt, metrics.jsonl, times.jsonl, summary.json and TensorBoard's events.

times.jsonl has one row per evaluation: `epoch`, and the fractions of the time before it that went to `compute`, to
waiting for `data` and to the `exchange` of gradients. It is separate from metrics.jsonl, whose rows are the same, bit
for bit, in a resumed run.
"""
import json
import math
import shutil
from pathlib import Path

from common.files import as_json, write_json, write_whole


def write_grid(path, images) -> None:
    """Writes images, uint8 (number, height, width, 3), as one picture with about as many rows as columns."""
    import numpy as np
    from PIL import Image

    columns = math.ceil(math.sqrt(len(images)))
    filled = np.pad(images, [(0, -len(images) % columns), (0, 0), (0, 0), (0, 0)])
    rows = [np.concatenate(filled[start:start + columns], axis=1) for start in range(0, len(filled), columns)]
    Image.fromarray(np.concatenate(rows, axis=0)).save(path)


class RunFolder:
    """An observer of training that writes the run's folder. progress: training.state.Progress."""

    def __init__(self, folder: Path, plan: dict, flags_text: str, progress):
        self.folder = folder
        write_json(folder / "plan.json", plan)
        write_whole(folder / "flags.txt", flags_text)
        self.go_back(progress)

    def go_back(self, progress) -> None:
        """Truncates the logs to this progress and rewrites TensorBoard's events."""
        import tensorflow as tf

        shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        self._events = tf.summary.create_file_writer(str(self.folder / "tensorboard"))
        (self.folder / "metrics.jsonl").touch()
        rows = self._cut("metrics.jsonl", progress.evaluations)
        layers = self._cut("trust_ratios.jsonl", progress.evaluations + (progress.step > 0))
        times = self._cut("times.jsonl", progress.evaluations)
        for row in rows:
            self._scalars(row["samples"], row)
        for row, breakdown in zip(rows, times, strict=False):  # a run of an earlier version has none
            self._breakdown(row["samples"], breakdown)
        for samples, row in zip([0, *(row["samples"] for row in rows)], layers, strict=False):
            self._scalars(samples, _by_value(row["layers"]))

    def _cut(self, name, count) -> list[dict]:
        """Truncates a file to its first rows and returns them. The last line of the file may be incomplete."""
        path = self.folder / name
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)[:count]
        write_whole(path, "".join(lines))
        return [json.loads(line) for line in lines]

    def step(self, samples: int, layers: dict) -> None:
        """Logs the layers. layers: as for `evaluation` at the first step, empty at any other."""
        del samples
        self._layers(0, 0, layers)

    def evaluation(self, row: dict, layers: dict, breakdown: dict) -> None:
        """Logs an evaluation.

        row: of metrics.jsonl. layers: variable -> [weight norm, gradient norm, trust ratio], empty unless logged.
        breakdown: the step-time breakdown since the previous evaluation, as fractions.
        """
        self._append("metrics.jsonl", row)
        self._append("times.jsonl", {"epoch": row["epoch"], **breakdown})
        self._breakdown(row["samples"], breakdown)
        self._layers(row["epoch"], row["samples"], layers)
        self._scalars(row["samples"], row)
        self._events.flush()

    def _breakdown(self, samples, breakdown):
        self._scalars(samples, {f"time/{name}": fraction for name, fraction in breakdown.items() if name != "epoch"})

    def _layers(self, epoch, samples, layers):
        if layers:
            self._append("trust_ratios.jsonl", {"epoch": epoch, "layers": layers})
            self._scalars(samples, _by_value(layers))

    def _scalars(self, samples, values):
        import tensorflow as tf

        with self._events.as_default(step=samples):
            for name, value in values.items():
                tf.summary.scalar(name, math.nan if value is None else value)

    def _append(self, name, row):
        with open(self.folder / name, "a") as file:
            file.write(as_json(row) + "\n")

    def end(self, summary: dict) -> None:
        self._events.close()
        write_json(self.folder / "summary.json", summary)


def _by_value(layers) -> dict:
    """Returns what TensorBoard shows of the layers: tag -> value."""
    return {f"{name}/{layer}": value for layer, values in layers.items()
            for name, value in zip(("weight_norm", "gradient_norm", "trust_ratio"), values, strict=True)}
