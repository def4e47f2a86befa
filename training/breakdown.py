"""The step-time breakdown: waiting for data, exchanging gradients, and the rest, which is computing.

Data and exchange are only the time that the computation waits. Loading that overlaps the previous micro-batch and
exchange that overlaps the backward pass cost nothing. Waiting for a slower worker is
part of the exchange. arXiv:1811.05233 and the GTC slides call its share synchronisation overhead.

Only one step in TIMED_ONE_IN is timed, since the clock makes a GPU and its host wait for each other.
"""
import time

import numpy as np
import tensorflow as tf

from distributed.world import World

NAMES = ("data", "exchange")
TIMED_ONE_IN = 20


class Clock:
    """Tells the time inside a compiled step. timed: bool, on the host; where it is false nothing waits, and it is 0."""

    def __init__(self, timed: tf.Tensor):
        self._timed = timed

    def after(self, tensors) -> tf.Tensor:
        """The time, float64 seconds, when all of these tensors are there: on the host, so a GPU's, too.

        A call of Python, as tf.timestamp is refused where operations have to be deterministic. A GPU does one thing
        after another: what it is given after all of the tensors, and has to come from it, is there when they are.
        """
        values = [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]
        with tf.control_dependencies(values):
            first = tf.reshape(values[0], [-1])[:1]
        return tf.cond(self._timed, lambda: tf.ensure_shape(tf.numpy_function(_now, [first], tf.float64), []),
                       lambda: tf.constant(0.0, tf.float64))


def on_host(timed: bool) -> tf.Tensor:
    """For a Clock. On a GPU, the host would have to wait for it."""
    with tf.device("/cpu:0"):
        return tf.constant(timed)


def _now(_):
    return np.float64(time.perf_counter())


class StepTimes:
    """Sums of images and seconds since the last `collect`: of all steps, and of those that were timed."""

    def __init__(self):
        self._images, self._seconds, self._timed = 0, 0.0, np.zeros(1 + len(NAMES))

    def add(self, images: int, seconds: float) -> None:
        """Of a step, timed or not."""
        self._images, self._seconds = self._images + images, self._seconds + seconds

    def add_timed(self, seconds: float, waited) -> None:
        """Of a timed step. waited: of these seconds, for each of NAMES."""
        self._timed += (seconds, *waited)

    def images_per_second(self) -> float:
        return self._images / self._seconds if self._images else 0.0

    def collect(self, world: World) -> dict[str, float]:
        """Fractions of all workers' timed steps, which add up to 1: compute, data, exchange; nothing without a step."""
        seconds, *waited = world.sum(tf.constant(self._timed), "times").numpy().tolist()
        self.__init__()
        if not seconds:
            return {}
        fractions = {name: one / seconds for name, one in zip(NAMES, waited, strict=True)}
        return {"compute": 1 - sum(fractions.values())} | fractions
