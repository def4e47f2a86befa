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
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from data.spool import Admitted
from distributed.world import World

NAMES = ("data", "exchange")
TIMED_ONE_IN = 20
NOT_READ = Admitted()


class Clock:
    """Reads the time inside a compiled step.

    timed: bool, on the host. If it is false, nothing waits and the time is 0.
    """

    def __init__(self, timed: tf.Tensor):
        self._timed = timed

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


@dataclass
class WorkerTimes:
    """Sums of a worker's seconds since they were last gathered.

    steps: number of timed steps. compute, data, exchange: seconds of the timed steps. squares: sum over these steps of
    the squared own time, which is computing and waiting for data. trained: seconds of all steps. storage: sums of
    data.spool.Admitted over all steps.
    """

    host: str = field(default_factory=socket.gethostname)
    steps: int = 0
    compute: float = 0.0
    data: float = 0.0
    exchange: float = 0.0
    squares: float = 0.0
    trained: float = 0.0
    storage: np.ndarray = field(default_factory=lambda: np.zeros(len(Admitted._fields)))

    @property
    def means(self) -> list[float]:
        """Mean seconds of a timed step: computing, waiting for data, exchange."""
        return [seconds / max(1, self.steps) for seconds in (self.compute, self.data, self.exchange)]


class StepTimes:
    """This worker's times and the images of all workers since the last `gather`."""

    def __init__(self):
        self._reset()

    def _reset(self):
        self._images = 0
        self._own = WorkerTimes()

    def add(self, images: int, seconds: float, admitted: Admitted = NOT_READ) -> None:
        """Adds a step, timed or not."""
        self._images += images
        self._own.trained += seconds
        self._own.storage += admitted

    def add_timed(self, seconds: float, waited) -> dict[str, float]:
        """Adds a timed step. waited: how many of these seconds it waited for each of NAMES. Returns the fractions."""
        own, (data, exchange) = self._own, map(float, waited)
        own.steps += 1
        own.compute += seconds - data - exchange
        own.data += data
        own.exchange += exchange
        own.squares += (seconds - exchange) ** 2
        return {"data": data / seconds, "exchange": exchange / seconds}

    def images_per_second(self) -> float:
        return self._images / self._own.trained if self._images else 0.0

    def gather(self, world: World) -> list[WorkerTimes]:
        """Returns the times of all workers, by rank, and resets."""
        own = self._own
        self._reset()
        return world.gather(own, "times")


def breakdown_of(workers: list[WorkerTimes]) -> dict[str, float]:
    """Returns compute, data and exchange as fractions of the timed steps of all workers.

    The fractions add up to 1. The dict is empty if no step was timed. If data were read ahead by a spool, it also
    has the fraction of all steps that workers waited for it, storage, and the sums of the rest of Admitted.
    """
    sums = {name: sum(getattr(one, name) for one in workers) for name in ("compute", *NAMES)}
    seconds = sum(sums.values())
    if not seconds:
        return {}
    breakdown = {name: value / seconds for name, value in sums.items()}
    storage, *traffic = sum(one.storage for one in workers).tolist()
    if storage:
        breakdown["storage"] = storage / sum(one.trained for one in workers)
        breakdown |= dict(zip(Admitted._fields[1:], map(int, traffic), strict=True))
    return breakdown
