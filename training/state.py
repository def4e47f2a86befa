"""All that a training needs to continue exactly where it is: the variables, its progress, the running sums."""
import re
import time
from dataclasses import dataclass, field, replace

import tensorflow as tf

from distributed import optimizer as distributed
from distributed.float16 import initial_scales
from distributed.world import World
from model_zoo.layers import input_numbers, trained_variables
from training.batch_norm import MovingStatistics
from training.layer_statistics import LayerStatistics
from training.noise_scale import NoiseScale
from training.weight_check import checksums

INPUT = "input"  # group of the normalization of a model's input


class Totals:
    """Sums over the samples since they were last collected: loss, top-1 hits, samples. The same on all workers."""

    def __init__(self):
        self.variable = tf.Variable(tf.zeros(3, tf.float64), trainable=False, name="totals")

    def add(self, results: tf.Tensor) -> None:
        """Adds an update. results: sums over its global batch, float32 (3,)."""
        self.variable.assign_add(tf.cast(results, tf.float64))

    def collect(self) -> dict[str, float]:
        """Returns loss and top1 (means) and samples, and starts again."""
        loss, top1, samples = self.variable.numpy().tolist()
        self.variable.assign(tf.zeros_like(self.variable))
        return {"loss": loss / samples, "top1": top1 / samples, "samples": int(samples)}


@dataclass
class Progress:
    """How far a training has come. With the plan, it determines what comes next, on any number of workers.

    Checkpoints hold all fields.
    """

    step: int = 0  # number of updates made
    samples: int = 0  # number of samples processed
    evaluations: int = 0  # number of evaluations made, equal to the rows of metrics.jsonl
    evaluated: int = 0  # number of samples processed before the last evaluation
    reshard_step: int = 0  # step at which the current slice of the stream begins
    skipped: int = 0  # number of samples of the stream that rollbacks have skipped
    rollbacks: int = 0  # number of rollbacks after a divergence
    workers: int = 0  # number of workers
    seconds: float = 0.0  # duration of this training in all its runs
    trained_seconds: float = 0.0  # duration of its steps alone
    statistics_step: int | None = None  # step after which batch norm's exact statistics were last measured
    records: list[dict] = field(default_factory=list)  # epoch, top1, seconds of each evaluation better than all before
    keeps_initial: bool = False  # whether training started from trained weights (see MovingStatistics)
    labels: str = ""  # labels_checksum of the training set, or empty
    validation: dict[str, str] = field(default_factory=dict)  # Dataset.validation_content

    @property
    def best(self) -> dict | None:
        """The evaluation with the highest validation top-1 so far."""
        return self.records[-1] if self.records else None

    def add_step(self, samples: int) -> None:
        """Counts an update, and its number of samples."""
        self.step += 1
        self.samples += samples

    def begin_slice(self, step: int) -> None:
        """Begins a new slice of the stream at a step, unless the current one begins later."""
        self.reshard_step = max(self.reshard_step, step)

    def add_rollback(self, before: "Progress", skipped: int | None) -> None:
        """Counts a rollback to this progress. before: the progress at the divergence.

        skipped: number of samples of the stream that are skipped from here on, or None to read the same ones again.
        """
        self.rollbacks = before.rollbacks + 1
        self.seconds = before.seconds
        if skipped is not None:
            self.begin_slice(self.step)
            self.skipped = skipped

    def take_dataset(self, labels: str, validation: dict[str, str]) -> str:
        """Notes what identifies the images. Returns, in words, what was another one before, or an empty text.

        labels: labels_checksum of the training set. validation: Dataset.validation_content.
        """
        before = self.labels, self.validation
        self.labels, self.validation = labels or self.labels, self.validation | validation
        if before[0] not in ("", self.labels):
            return "names or labels of training images"
        return "validation images" if before[1].items() - self.validation.items() else ""

    def add_evaluation(self, epoch: float, top1: float, seconds: float, measured_statistics: bool = False) -> None:
        """Counts an evaluation of the current weights.

        top1: of the average of the weights if there is one. measured_statistics: whether batch norm's exact statistics
        were measured for it.
        """
        self.evaluations += 1
        self.evaluated = self.samples
        self.statistics_step = self.step if measured_statistics else None
        if not self.best or top1 > self.best["top1"]:  # a new list, because snapshots share the old one
            self.records = [*self.records, {"epoch": epoch, "top1": top1, "seconds": seconds}]


@dataclass(frozen=True)
class Snapshot:
    """The state of a training at one step.

    The tensors cost no memory until a variable is assigned to. TensorFlow then leaves the old buffer to the snapshot.
    """

    tensors: dict[str, tf.Tensor] = field(repr=False)  # every variable, by name
    progress: Progress
    checksums: dict[str, int] = field(default_factory=dict)  # of each group of variables, by its name; see weight_check


class State:
    """The state of a running training.

    logs_layers: whether `layers` records norms and trust ratios. average: optim.average.WeightAverage, or None. moving:
    batch norm's moving statistics, or None if they do not move. noise: the estimates of the noise scale, or None.
    freeze: whether the last layer alone is trained. trained: the variables that are. exchange_scales: those of
    GradientExchange.
    """

    def __init__(self, model, optimizer, *, logs_layers: bool = False, average=None,
                 moving: MovingStatistics | None = None, noise: NoiseScale | None = None, freeze: bool = False):
        self.model = model
        self.optimizer = optimizer
        self.average = average
        self.moving = moving
        self.noise = noise
        self.totals = Totals()
        self.progress = Progress()
        self.trained = trained_variables(model, freeze)
        self.layers = LayerStatistics(optimizer, self.trained) if logs_layers else None
        self.exchange_scales = initial_scales(len(self.trained))
        recorded = {"layer_norms": self.layers.variable} if self.layers else {}
        recorded |= {"noise_scale": noise.variable} if noise else {}
        optimizers = distributed.variables(optimizer, self.exchange_scales)
        self.variables = (model_variables(model) | named("optimizer", optimizers)
                          | named("ema", average.variables if average else []) | recorded
                          | {"totals": self.totals.variable})
        self.start_clock()

    def start_clock(self) -> None:
        """Starts the clock of the progress, at the seconds that it has."""
        self._began = time.perf_counter() - self.progress.seconds

    def read_clock(self) -> Progress:
        """Returns the progress, with the seconds up to now."""
        self.progress.seconds = time.perf_counter() - self._began
        return self.progress

    def write_statistics(self) -> None:
        """Gives the model batch norm's moving statistics. Call it before the model is evaluated."""
        if self.moving:
            self.moving.write()

    def snapshot(self, world: World) -> Snapshot:
        """Returns a snapshot of the current state."""
        self.write_statistics()
        if self.noise:
            self.noise.write()
        tensors = {name: v.read_value() for name, v in self.variables.items()}
        return Snapshot(tensors, replace(self.read_clock(), workers=world.size), checksums(tensors))

    def broadcast(self, snapshot: Snapshot | None, world: World, root: int = 0) -> int | None:
        """Gives every worker the state of rank `root`: that of its snapshot, or its current one if it has none.

        Returns the number of workers of the snapshot, or None if there was none.
        """
        if snapshot and world.rank == root:
            for name, variable in self.variables.items():
                variable.assign(snapshot.tensors[name])
            self.progress = replace(snapshot.progress)
        self.progress, is_loaded = world.broadcast((self.progress, snapshot is not None), "progress", root)
        world.broadcast_variables(list(self.variables.values()), root)
        if self.moving:
            self.moving.keeps_initial = self.progress.keeps_initial
            self.moving.read()
        if self.noise:
            self.noise.read()
        self.start_clock()
        return self.progress.workers if is_loaded else None


def model_variables(model) -> dict[str, tf.Variable]:
    """Returns the variables of a model and the normalization of its input, by name."""
    return named("model", model.variables) | named(INPUT, input_numbers(model))


def named(group: str, variables) -> dict[str, tf.Variable]:
    """Returns variables by names that are the same in every process. Keras's own names count a process's layers."""
    return {f"{group}/{number:03}/{re.sub(r'_[0-9]+(?=/|$)', '', variable.name.split(':')[0])}": variable
            for number, variable in enumerate(variables)}
