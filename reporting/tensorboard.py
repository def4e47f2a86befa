"""TensorBoard's events, under names that are the same in every run. The horizontal axis counts samples.

The events are made from the files of the run's folder, so that a resumed run and a rollback rewrite them.
"""
import contextlib
import math

from common import metric
from common.activity import PARTS
from common.errors import complain, one_line
from common.run_folder import AUGMENTATIONS, LAYERS, METRICS, TENSORBOARD, TIMES, RunFolder
from training.observer import Evaluation, Observer, RunInfo

TAGS = {  # column of metrics.jsonl -> name in TensorBoard
    metric.TRAIN_LOSS: "loss/train", metric.VAL_LOSS: "loss/validation", metric.TRAIN_TOP1: "top1/train",
    metric.VAL_TOP1: "top1/validation", metric.VAL_TOP5: "top5/validation",
    **{f"{prefix}val_{figure}": f"{figure}/{prefix.rstrip('_')}"
       for prefix in metric.VARIANTS for figure in ("loss", "top1", "top5")},
    metric.LEARNING_RATE: "schedule/learning_rate", metric.MOMENTUM: "schedule/momentum",
    metric.BATCH_SIZE: "schedule/batch_size", metric.IMAGES_PER_SECOND: "throughput/images_per_second",
    metric.SECONDS: "throughput/seconds", metric.EPOCH: "throughput/epochs"}
KINDS = ("weight_norm", "gradient_norm", "trust_ratio")
SCALARS = {  # log -> function that returns the scalars of one of its rows, by name
    METRICS: lambda row: {TAGS.get(name, f"other/{name}"): value for name, value in row.items()
                          if name not in (metric.SAMPLES, metric.WEIGHTS)},
    TIMES: lambda row: {f"time/{part}": row[part] for part in (*PARTS, "storage") if part in row},
    LAYERS: lambda row: {f"{kind}/{layer}": value for layer, values in row["layers"].items()
                         for kind, value in zip(KINDS, values, strict=False)}}  # without a trust ratio, two values
EVENTS = "events.out.tfevents.*"


class TensorBoard(Observer):
    """Writes the rows of the logs to FOLDER/tensorboard.

    If the events cannot be written, as on a full disk, one line says so. They are written again, from the rows, after
    the next evaluation or at the end.
    """

    def __init__(self, files: RunFolder):
        self._files = files
        self._events = None
        self._is_failing = False

    def start(self, run: RunInfo) -> None:
        self._run = run
        self._write()

    def rewind(self, progress) -> None:
        self._close()
        self._write()

    def evaluation(self, evaluation: Evaluation) -> None:
        self._write()

    def _write(self):
        """Appends new rows to the open file of events, or writes all rows to a new file in place of the old ones."""
        import tensorflow as tf

        folder = self._files.path / TENSORBOARD
        files = {*folder.glob(EVENTS)}
        replaced = () if self._events else files
        with self._complaining():
            if not self._events:
                self._events = tf.summary.create_file_writer(str(folder))
                self._written = dict.fromkeys(SCALARS, 0)
                self._describe()
            for log, scalars in SCALARS.items():
                rows = self._files.rows(log, self._written[log])
                for row in rows:
                    with self._events.as_default(step=row[metric.SAMPLES]):
                        for name, value in scalars(row).items():
                            tf.summary.scalar(name, math.nan if value is None else value)
                self._written[log] += len(rows)
            self._events.flush()
            for file in replaced:
                file.unlink()
            self._is_failing = False
        for unfinished in () if self._events else {*folder.glob(EVENTS)} - files:
            unfinished.unlink()

    @contextlib.contextmanager
    def _complaining(self):
        """Context manager for writing events. Turns an error into a warning, and closes the file of events."""
        import tensorflow as tf

        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            self._events = None
            if not self._is_failing:
                complain(f"warning: TensorBoard's events cannot be written: {one_line(error).partition(';')[0][:200]}; "
                         "training continues, and they are written when that is possible")
            self._is_failing = True

    def _describe(self):
        """Writes the flags, the plan and the augmented images."""
        import tensorflow as tf

        run = self._run
        images = self._files.path / AUGMENTATIONS
        with self._events.as_default(step=0):
            tf.summary.text("flags", markdown([{"flag": f"--{name}", "value": value} for name, value in
                                               run.flags.items() if value not in (None, [])]))
            tf.summary.text("plan", "\n\n".join(map(markdown, (
                [{name: value for name, value in run.plan.items() if not isinstance(value, list)}],
                run.plan["phases"], run.plan["schedule"]))))
            if run.flags["save_augmentations"] and images.is_file():
                tf.summary.image("augmentations", tf.io.decode_png(images.read_bytes())[None])

    def close(self) -> None:
        if self._is_failing:
            self._write()
        self._close()

    def _close(self):
        if self._events:
            with self._complaining():
                self._events.close()
        self._events = None


def markdown(rows: list[dict]) -> str:
    """Returns rows as a table in Markdown."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns),
             *([str(row.get(name, "")).replace("|", "\\|") for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
