"""The step-time breakdown: waiting for data, exchanging gradients, and the rest, which is computing.

Waiting for data includes waiting for what has to be read or fetched before DALI can decode it, which is measured for
itself, in all steps: storage.

Data and exchange count only the time that the computation waits. Loading that overlaps the previous micro-batch and
exchange that overlaps the backward pass cost nothing. Waiting for a slower worker is part of the exchange.
arXiv:1811.05233 and the GTC slides call the fraction of the exchange synchronisation overhead.

Only one step in TIMED_ONE_IN is timed, because the clock makes a GPU and its host wait for each other.
"""
import socket
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from data.staging.spool import Admitted
from distributed.world import World
from training.marks import Marks

NAMES = ("data", "exchange")
TIMED_ONE_IN = 20
NOT_READ = Admitted()
READ = Admitted._fields
# Sums of a worker: the number of timed steps and their seconds, the sum of their squared own times (computing and
# waiting for data), the seconds of all steps, and what they read.
COLUMNS = ("steps", "compute", *NAMES, "squares", "trained", *READ)


class Lap(NamedTuple):
    """How far a timed step has come: when it ended what it did last, and how long it has waited, float64 seconds."""

    until: tf.Tensor
    data: tf.Tensor
    exchange: tf.Tensor

    @property
    def waited(self) -> tf.Tensor:
        """The seconds waited for each of NAMES, float32."""
        return tf.cast(tf.stack([self.data, self.exchange]), tf.float32)


class Clock:
    """Reads the time inside a compiled step, and marks what it does.

    timed: bool, on the host. If it is false, nothing waits and all times are 0. marks: made where nothing is traced.
    """

    def __init__(self, timed: tf.Tensor, marks: Marks):
        self._timed = timed
        self._marks = marks

    def start(self, tensor) -> Lap:
        """Starts when this tensor is ready."""
        nothing = tf.constant(0.0, tf.float64)
        return Lap(self.after([tensor]), nothing, nothing)

    def next_of(self, iterator, lap: Lap) -> tuple:
        """Returns the next batch, which is not asked for before the lap's end, and the lap with the wait for it."""
        with tf.control_dependencies([lap.until]):
            images, *others = self._marks.next_of(iterator)
        arrived = self.after([images, *others])
        with tf.control_dependencies([arrived]):  # with one thread, the clock could be read after computing
            images = tf.identity(images)
        return (images, *others), lap._replace(until=arrived, data=lap.data + arrived - lap.until)

    def computed(self, gradients, lap: Lap) -> Lap:
        """Returns the lap to the end of a backward pass."""
        self._marks.set_computed(gradients)
        return lap._replace(until=self.after(gradients))

    def exchanged(self, gradients, lap: Lap) -> Lap:
        """Returns the lap to the end of the exchange, which one worker may see before that of its backward pass."""
        until = self.after(gradients)
        return lap._replace(until=until, exchange=tf.maximum(until - lap.until, 0.0))

    def after(self, tensors) -> tf.Tensor:
        """Returns the time, float64 seconds on the host's clock, at which all tensors are ready.

        It calls Python, because TensorFlow refuses tf.timestamp if operations have to be deterministic. It works for a
        GPU, too: a GPU runs its operations in order, so a value that is computed after all tensors, and copied to the
        host, arrives when they are ready.
        """
        values = [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]
        with tf.control_dependencies(values):
            first = tf.reshape(values[0], [-1])[:1]
        return tf.cond(self._timed, lambda: tf.ensure_shape(tf.numpy_function(_now, [first], tf.float64), []),
                       lambda: tf.constant(0.0, tf.float64))


def on_host(value, dtype: tf.DType | None = None) -> tf.Tensor:
    """Returns an argument of a compiled step, on the host: a copy to a GPU could wait for what the GPU has to do."""
    with tf.device("/cpu:0"):
        return tf.constant(value, dtype)


def _now(_):
    return np.float64(time.perf_counter())


@dataclass(frozen=True)
class WorkerTimes:
    """Sums of all workers' seconds since they were last gathered.

    hosts: by rank. sums: float64 (workers, len(COLUMNS)).
    """

    hosts: list[str]
    sums: np.ndarray

    def columns(self, *names: str) -> np.ndarray:
        """Returns some of COLUMNS, float64 (workers, names)."""
        return self.sums[:, [COLUMNS.index(name) for name in names]]

    @property
    def means(self) -> list[list[float]]:
        """Mean seconds of a timed step of each worker: computing, waiting for data, exchange."""
        return (self.columns("compute", *NAMES) / np.maximum(1, self.columns("steps"))).tolist()


class StepTimes:
    """This worker's times and the images of all workers since the last `gather`."""

    def __init__(self):
        self._hosts = None
        self._reset()

    def _reset(self):
        self._images = 0
        self._own = dict.fromkeys(COLUMNS, 0.0)

    def add(self, images: int, seconds: float, admitted: Admitted = NOT_READ) -> None:
        """Adds a step, timed or not."""
        self._images += images
        self._add("trained", seconds)
        for name, value in zip(READ, admitted, strict=True):
            self._add(name, value)

    def add_timed(self, seconds: float, waited) -> dict[str, float]:
        """Adds a timed step. waited: how many of these seconds it waited for each of NAMES. Returns the fractions."""
        data, exchange = map(float, waited)
        for name, value in (("steps", 1), ("compute", seconds - data - exchange), ("data", data),
                            ("exchange", exchange), ("squares", (seconds - exchange) ** 2)):
            self._add(name, value)
        return {"data": data / seconds, "exchange": exchange / seconds}

    def _add(self, name: str, value: float) -> None:
        self._own[name] += value

    def images_per_second(self) -> float:
        return self._images / self._own["trained"] if self._images else 0.0

    def gather(self, world: World) -> WorkerTimes:
        """Returns the times of all workers, and resets. The workers have to be the same each time."""
        own = [*self._own.values()]
        self._reset()
        self._hosts = self._hosts or world.gather(socket.gethostname(), "hosts")
        return WorkerTimes(self._hosts, world.concatenate(np.array([own]), "times"))


def breakdown_of(workers: WorkerTimes) -> dict[str, float]:
    """Returns compute, data and exchange as fractions of the timed steps of all workers.

    The fractions add up to 1. The dict is empty if no step was timed. If data were read ahead by a spool, it also
    has the fraction of all steps that workers waited for it, storage, and the sums of the rest of Admitted.
    """
    sums = dict(zip(COLUMNS, workers.sums.sum(axis=0).tolist(), strict=True))
    seconds = sum(sums[name] for name in ("compute", *NAMES))
    if not seconds:
        return {}
    breakdown = {name: sums[name] / seconds for name in ("compute", *NAMES)}
    storage, *traffic = READ
    if sums[storage]:
        breakdown["storage"] = sums[storage] / sums["trained"]
        breakdown |= {name: int(sums[name]) for name in traffic}
    return breakdown
