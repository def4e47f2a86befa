"""The run's folder: plan.json, flags.txt, metrics.jsonl, times.jsonl, summary.json and TensorBoard's events.

times.jsonl has a row an evaluation, too: `epoch`, and the fractions of the time before it that went to `compute`, to
waiting for `data` and to the `exchange` of gradients. It stands apart from metrics.jsonl, whose rows are the same, to
the bit, in a resumed run.
"""
import json
import math
import shutil
from pathlib import Path

from common.files import as_json, write_json, write_whole


def write_grid(path, images) -> None:
    """Images uint8 (number, height, width, 3), as a picture of about as many rows as columns."""
    import numpy as np
    from PIL import Image

    columns = math.ceil(math.sqrt(len(images)))
    filled = np.pad(images, [(0, -len(images) % columns), (0, 0), (0, 0), (0, 0)])
    rows = [np.concatenate(filled[start:start + columns], axis=1) for start in range(0, len(filled), columns)]
    Image.fromarray(np.concatenate(rows, axis=0)).save(path)


class RunFolder:
    """An observer of training that writes what it sees. progress: how far the training has come,
    training.state's."""

    def __init__(self, folder: Path, plan: dict, flags_text: str, progress):
        self.folder = folder
        write_json(folder / "plan.json", plan)
        write_whole(folder / "flags.txt", flags_text)
        self.go_back(progress)

    def go_back(self, progress) -> None:
        """Truncates the logs to this progress. TensorBoard's events are rewritten."""
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
        """The first rows of a file, whose others are removed; a last line may have been broken off."""
        path = self.folder / name
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)[:count]
        write_whole(path, "".join(lines))
        return [json.loads(line) for line in lines]

    def step(self, samples: int, layers: dict) -> None:
        """layers: as for `evaluation`, at the first step; empty at any other."""
        del samples
        self._layers(0, 0, layers)

    def evaluation(self, row: dict, layers: dict, breakdown: dict) -> None:
        """row: of metrics.jsonl. layers: variable -> [weight norm, gradient norm, trust ratio]; empty unless logged.

        breakdown: fractions of the time since the evaluation before, by what it went to.
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
    """What TensorBoard shows of the layers: its name for a number -> the number."""
    return {f"{name}/{layer}": value for layer, values in layers.items()
            for name, value in zip(("weight_norm", "gradient_norm", "trust_ratio"), values, strict=True)}
