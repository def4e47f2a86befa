"""Inside a compiled step: counts of its batches, which another thread reads, and the seconds that it waits.

Only one step in TIMED_ONE_IN is timed, or more between two evaluations with few steps (breakdown.timed_every), because
the clock makes a GPU and its host wait for each other.
"""
import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from common.activity import COMPUTING, DATA, OTHERS

TIMED_ONE_IN = 20


class Timing(NamedTuple):
    """The times of a step up to some point in it, float64 seconds."""

    until: tf.Tensor  # when the step reached that point
    data: tf.Tensor  # how long it has waited for data
    exchange: tf.Tensor  # how long it has waited for the exchange

    @property
    def waited(self) -> tf.Tensor:
        """The seconds waited for each of WAITS, float32."""
        return tf.cast(tf.stack([self.data, self.exchange]), tf.float32)


class BatchCounts:
    """Counts the batches of this process's compiled steps, on the host: requested, arrived, and computed.

    Another thread reads the counts to see what a step that does not end waits for. The computation does not wait for
    them.
    """

    def __init__(self):
        with tf.device("/cpu:0"):
            self._counts = [tf.Variable(0, trainable=False, dtype=tf.int64) for _ in range(3)]

    def restart(self) -> None:
        """Sets the counts to 0, because steps that failed have left them unequal."""
        for count in self._counts:
            count.assign(0)

    def next_of(self, iterator, timing: Timing | None = None):
        """Returns the next batch, in a compiled step. It is not requested before the time of `timing`."""
        requested, arrived, _ = self._counts
        with tf.control_dependencies([timing.until] if timing else []):
            requested.assign_add(1, read_value=False)
            batch = next(iterator)
        with tf.control_dependencies(batch):
            arrived.assign_add(1, read_value=False)
        return batch

    def set_computed(self, tensors: Sequence) -> None:
        """Counts a batch as computed once these tensors, its results, are ready."""
        with tf.control_dependencies(values_of(tensors)):
            self._counts[-1].assign_add(1, read_value=False)

    def in_update(self, has_neighbours: bool) -> tuple[int, str]:
        """Returns a number that grows with progress, and what an update waits for or does.

        has_neighbours: whether workers exchange statistics of batch norm while they compute.
        """
        count, waits_for_data, is_computing = self._look()
        return count, DATA if waits_for_data else COMPUTING if is_computing and not has_neighbours else OTHERS

    def in_evaluation(self) -> tuple[int, str | None]:
        """Returns a number that grows with progress, and DATA if an evaluation waits for data, otherwise None."""
        count, waits_for_data, _ = self._look()
        return count, DATA if waits_for_data else None

    def _look(self) -> tuple[int, bool, bool]:
        requested, arrived, computed = (int(count.numpy()) for count in self._counts)
        return requested + arrived + computed, computed == arrived < requested, computed < arrived


@functools.cache
def batch_counts() -> BatchCounts:
    """Returns the counts of this process. The first call creates variables, so it must not be traced."""
    return BatchCounts()


class Clock:
    """Reads the time inside a compiled step.

    timed: bool, on the host. If it is false, nothing waits and all times are 0.
    """

    def __init__(self, timed: tf.Tensor):
        self._timed = timed

    def start(self, tensor) -> Timing:
        """Returns the timing of a step that starts when this tensor is ready."""
        nothing = tf.constant(0.0, tf.float64)
        return Timing(self.after([tensor]), nothing, nothing)

    def arrived(self, batch, timing: Timing) -> tuple[tuple, Timing]:
        """Returns a batch that was requested at the time of `timing`, and the timing up to its arrival."""
        images, *others = batch
        arrived = self.after(batch)
        with tf.control_dependencies([arrived]):  # with one thread, the clock could be read after computing
            images = tf.identity(images)
        return (images, *others), timing._replace(until=arrived, data=timing.data + arrived - timing.until)

    def computed(self, gradients, timing: Timing) -> Timing:
        """Returns the timing up to the end of a backward pass."""
        return timing._replace(until=self.after(gradients))

    def exchanged(self, gradients, timing: Timing) -> Timing:
        """Returns the timing up to the end of the exchange. A time before that of the backward pass is no wait."""
        until = self.after(gradients)
        return timing._replace(until=until, exchange=tf.maximum(until - timing.until, 0.0))

    def after(self, tensors) -> tf.Tensor:
        """Returns the time, float64 seconds on the host's clock, at which all tensors are ready.

        It calls Python, because TensorFlow refuses tf.timestamp if operations have to be deterministic. It works for a
        GPU, too: a GPU runs its operations in order, so a value that is computed after all tensors, and copied to the
        host, arrives when they are ready.
        """
        values = values_of(tensors)
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


def values_of(tensors: Sequence) -> list[tf.Tensor]:
    """Returns tensors, which may be sparse gradients, as values that an operation can depend on."""
    return [tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]
