"""Marks in compiled steps, by which another thread sees what a step that does not end waits for.

They are counted on the host: the batches that steps have asked for, those that have arrived, and those whose
computation has ended. The computation does not wait for the marks.
"""
import functools
from collections.abc import Sequence

import tensorflow as tf

from common.activity import DATA, OTHERS


class Marks:
    """The marks of this process."""

    def __init__(self):
        with tf.device("/cpu:0"):
            self._counts = [tf.Variable(0, trainable=False, dtype=tf.int64) for _ in range(3)]

    def restart(self) -> None:
        """Forgets steps that have failed."""
        for count in self._counts:
            count.assign(0)

    def next_of(self, iterator):
        """Returns the next batch, in a compiled step."""
        asked, arrived, _ = self._counts
        asked.assign_add(1, read_value=False)
        batch = next(iterator)
        with tf.control_dependencies(batch):
            arrived.assign_add(1, read_value=False)
        return batch

    def set_computed(self, tensors: Sequence) -> None:
        """Marks the end of a batch's computation, after which all tensors are there."""
        with tf.control_dependencies([
                tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor for tensor in tensors]):
            self._counts[-1].assign_add(1, read_value=False)

    def in_update(self, has_neighbours: bool) -> tuple[int, str]:
        """Returns a number that grows with progress, and what an update waits for.

        has_neighbours: whether workers exchange statistics of batch norm while they compute.
        """
        count, waits_for_data, is_computing = self._look()
        return count, DATA if waits_for_data else "computing" if is_computing and not has_neighbours else OTHERS

    def in_evaluation(self) -> tuple[int, str | None]:
        """Returns a number that grows with progress, and whether an evaluation waits for data."""
        count, waits_for_data, _ = self._look()
        return count, DATA if waits_for_data else None

    def _look(self) -> tuple[int, bool, bool]:
        asked, arrived, computed = (int(count.numpy()) for count in self._counts)
        return asked + arrived + computed, computed == arrived < asked, computed < arrived


@functools.cache
def marks() -> Marks:
    """Returns the marks of this process. Call it first where nothing is traced."""
    return Marks()
