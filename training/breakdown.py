"""The step-time breakdown: waiting for data, exchanging gradients, and the rest, which is computing.

Both are what the computation has to wait for: data that come while the micro-batch before is still being worked on cost
nothing, and neither do gradients that are exchanged while the backward pass goes on. Waiting for a slower worker is
part of the exchange. arXiv:1811.05233 and the GTC slides call its share synchronisation overhead.
"""
import time

import numpy as np
import tensorflow as tf

from distributed.world import World

NAMES = ("data", "exchange")


def after(tensors) -> tf.Tensor:
    """The time, float64 seconds, when all of these tensors are there: on the host, so a GPU's, too.

    A call of Python, as tf.timestamp is refused where operations have to be deterministic. A GPU does one thing after
    another: what it is given after all of the tensors, and has to come from it, is there when they are.
    """
    values = [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]
    with tf.control_dependencies(values):
        first = tf.reshape(values[0], [-1])[:1]
    return tf.ensure_shape(tf.numpy_function(_now, [first], tf.float64), [])


def _now(_):
    return np.float64(time.perf_counter())


class StepTimes:
    """Sums of images and seconds since the last `collect`."""

    def __init__(self):
        self._images, self._sums = 0, np.zeros(1 + len(NAMES))

    def add(self, images: int, seconds: float, waited) -> None:
        """images, seconds: of a step; waited: of these seconds, for each of NAMES."""
        self._images += images
        self._sums += (seconds, *waited)

    def images_per_second(self) -> float:
        return self._images / self._sums[0] if self._images else 0.0

    def collect(self, world: World) -> dict[str, float]:
        """Fractions of the time of all workers, which add up to 1: compute, data, exchange; nothing without a step."""
        seconds, *waited = world.sum(tf.constant(self._sums), "times").numpy().tolist()
        self._images, self._sums[:] = 0, 0
        if not seconds:
            return {}
        fractions = {name: one / seconds for name, one in zip(NAMES, waited, strict=True)}
        return {"compute": 1 - sum(fractions.values())} | fractions
