"""The step-time breakdown: waiting for data, exchanging gradients, and the rest, which is computing.

Data and exchange count only the time that the computation waits. Loading that overlaps the previous micro-batch and
exchange that overlaps the backward pass cost nothing. Waiting for a slower worker is part of the exchange.
arXiv:1811.05233 and the GTC slides call the fraction of the exchange synchronisation overhead.

Only one step in TIMED_ONE_IN is timed, because the clock makes a GPU and its host wait for each other.
"""
import time

import numpy as np
import tensorflow as tf

from distributed.world import World

NAMES = ("data", "exchange")
TIMED_ONE_IN = 20


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


def on_host(timed: bool) -> tf.Tensor:
    """Returns the `timed` of a Clock, on the host, because the host would have to wait for a GPU."""
    with tf.device("/cpu:0"):
        return tf.constant(timed)


def _now(_):
    return np.float64(time.perf_counter())


class StepTimes:
    """Sums of images and seconds since the last `collect`, over all steps and over the timed ones."""

    def __init__(self):
        self._reset()

    def _reset(self):
        self._images = 0
        self._seconds = 0.0
        self._timed = np.zeros(1 + len(NAMES))  # seconds, and those waited for each of NAMES

    def add(self, images: int, seconds: float) -> None:
        """Adds a step, timed or not."""
        self._images += images
        self._seconds += seconds

    def add_timed(self, seconds: float, waited) -> dict[str, float]:
        """Adds a timed step. waited: how many of these seconds it waited for each of NAMES. Returns the fractions."""
        self._timed += (seconds, *waited)
        return {name: float(one) / seconds for name, one in zip(NAMES, waited, strict=True)}

    def images_per_second(self) -> float:
        return self._images / self._seconds if self._images else 0.0

    def collect(self, world: World) -> dict[str, float]:
        """Returns compute, data and exchange as fractions of the timed steps of all workers, and resets.

        The fractions add up to 1. The dict is empty if no step was timed.
        """
        seconds, *waited = world.sum(tf.constant(self._timed), "times").numpy().tolist()
        self._reset()
        if not seconds:
            return {}
        fractions = {name: one / seconds for name, one in zip(NAMES, waited, strict=True)}
        return {"compute": 1 - sum(fractions.values())} | fractions
