"""Groups of neighbouring workers that share batch norm statistics."""
from collections.abc import Iterable
from dataclasses import dataclass

import horovod.tensorflow as hvd
import tensorflow as tf

from distributed.torus import created, process_set


@dataclass(frozen=True)
class Neighbours:
    """Groups of `count` workers with consecutive ranks. Pass `process_sets` to hvd.init."""

    count: int
    workers: int

    @property
    def process_sets(self) -> list:
        return created(self._groups)

    @property
    def _groups(self) -> list:
        return [process_set(range(first, first + self.count), self.workers)
                for first in range(0, self.workers, self.count)]

    def mean(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the mean over this worker's group. Its gradient is averaged over the group, too."""
        group = self._groups[hvd.rank() // self.count]
        return hvd.allreduce(tensor, op=hvd.Sum, process_set=group, name=name) / self.count


def distinct(*many: Iterable) -> list:
    """Returns each process set once, because Horovod refuses to create one twice."""
    return list({id(group): group for process_sets in many for group in process_sets}.values())
