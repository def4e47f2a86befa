"""TensorBoard's events, under names that are the same in every run. The horizontal axis counts samples.

The events are made from the files of the run's folder, so that a resumed run and a rollback rewrite them.
"""
import math

from common.files import read_rows
from reporting.observer import Evaluation, Observer, RunInfo, Update

TAGS = {  # column of metrics.jsonl -> name in TensorBoard
    "train_loss": "loss/train", "val_loss": "loss/validation", "ema_val_loss": "loss/ema",
    "train_top1": "top1/train", "val_top1": "top1/validation", "ema_val_top1": "top1/ema",
    "val_top5": "top5/validation", "ema_val_top5": "top5/ema",
    "learning_rate": "schedule/learning_rate", "momentum": "schedule/momentum", "batch_size": "schedule/batch_size",
    "images_per_second": "throughput/images_per_second", "seconds": "throughput/seconds", "epoch": "throughput/epochs"}
LAYERS = ("weight_norm", "gradient_norm", "trust_ratio")


class TensorBoard(Observer):
    """Writes FOLDER/tensorboard. Has to come after RunFolder, whose files it reads."""

    def start(self, run: RunInfo) -> None:
        self._run, self._events = run, None
        self.rewind(run.progress)

    def rewind(self, progress) -> None:
        """Rewrites the events. Keeps profiles."""
        import tensorflow as tf

        self.close()
        folder = self._run.folder / "tensorboard"
        for leftover in folder.glob("events.out.tfevents.*"):
            leftover.unlink()
        self._events = tf.summary.create_file_writer(str(folder))
        self._describe()
        rows, times, layers = (read_rows(self._run.folder / f"{name}.jsonl")
                               for name in ("metrics", "times", "trust_ratios"))
        for row in rows:
            self._row(row)
        for row, breakdown in zip(rows, times, strict=False):  # a run of an earlier version has none
            self._breakdown(row["samples"], breakdown)
        for samples, row in zip([0, *(row["samples"] for row in rows)], layers, strict=False):
            self._layers(samples, row["layers"])
        self._events.flush()

    def _describe(self):
        """Writes the flags, the plan and the augmented images."""
        import tensorflow as tf

        run, images = self._run, self._run.folder / "augmentations.png"
        with self._events.as_default(step=0):
            tf.summary.text("flags", markdown([{"flag": f"--{name}", "value": value} for name, value in
                                               run.flags.items() if value not in (None, [])]))
            tf.summary.text("plan", "\n\n".join(map(markdown, (
                [{name: value for name, value in run.plan.items() if not isinstance(value, list)}],
                run.plan["phases"], run.plan["schedule"]))))
            if run.flags.get("save_augmentations") and images.is_file():
                tf.summary.image("augmentations", tf.io.decode_png(images.read_bytes())[None])

    def step(self, update: Update) -> None:
        """Logs the layers of the first update."""
        self._layers(0, update.layers)

    def evaluation(self, evaluation: Evaluation) -> None:
        samples = evaluation.row["samples"]
        self._row(evaluation.row)
        self._breakdown(samples, evaluation.breakdown)
        self._layers(samples, evaluation.layers)
        self._events.flush()

    def _row(self, row):
        self._scalars(row["samples"], {TAGS.get(name, f"other/{name}"): value for name, value in row.items()
                                       if name != "samples"})

    def _breakdown(self, samples, breakdown):
        self._scalars(samples, {f"time/{name}": fraction for name, fraction in breakdown.items() if name != "epoch"})

    def _layers(self, samples, layers):
        self._scalars(samples, {f"{kind}/{layer}": value for layer, values in layers.items()
                                for kind, value in zip(LAYERS, values, strict=True)})

    def _scalars(self, samples, values):
        import tensorflow as tf

        with self._events.as_default(step=samples):
            for name, value in values.items():
                tf.summary.scalar(name, math.nan if value is None else value)

    def close(self) -> None:
        if self._events:
            self._events.close()


def markdown(rows: list[dict]) -> str:
    """Returns rows as a table in Markdown."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns),
             *([str(row.get(name, "")).replace("|", "\\|") for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
