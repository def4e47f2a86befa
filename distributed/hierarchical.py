"""The hierarchical all-reduce of Jia et al. (arXiv:1807.11205), built from Horovod's collectives on process sets.

N workers are n nodes of L consecutive ranks. The first rank of a node is its master. Each bucket of gradients, S bytes,
is summed in three steps:

    1. reduce within the node     each other rank sends S to the master, which adds up L vectors    L - 1 messages
    2. ring over the masters      each master sends S * 2 (n - 1) / n, the other ranks wait         2 (n - 1)
    3. broadcast within the node  the master's sum reaches the other ranks                          L - 1

A node sends as many bytes as in the torus whose rows are the nodes (torus.py), but one rank sends them all: L times as
many as each rank of that torus does (arXiv:1811.05233, section 2.2).

Horovod has no reduce to one rank. Step 1 is an all-to-all in which only the master receives. It sums in float32 and in
rank order, whatever the dtype in transit. Step 2 sums in the dtype in transit. All ranks end with the same bits.
"""
import horovod.tensorflow as hvd
import tensorflow as tf

from distributed.torus import Stepwise, all_reduce, created, process_set, sum_of_parts


class Hierarchical(Stepwise):
    """The three steps on a process set for each node and one for the masters. Pass `process_sets` to hvd.init.

    All nodes have `local_size` workers, and at least two.
    """

    def __init__(self, local_size: int, nodes: int):
        workers = local_size * nodes
        self._local_size = local_size
        self._nodes = [process_set(range(first, first + local_size), workers)
                       for first in range(0, workers, local_size)]
        self._masters = process_set(range(0, workers, local_size), workers)
        self.process_sets = created([*self._nodes, self._masters])

    @property
    def steps(self):
        return self.reduce, self.all_reduce, self.broadcast

    def reduce(self, flat, name):
        """Returns the sum over the node on its master, and the rank's own vector on other ranks."""
        splits = tf.constant([flat.shape[0]] + [0] * (self._local_size - 1), tf.int32)
        received, _ = hvd.alltoall(flat, splits=splits, process_set=self._node, name=f"{name}_reduce",
                                   ignore_name_scope=True)
        if self._is_master:
            return sum_of_parts(tf.ensure_shape(received, [self._local_size * flat.shape[0]]), self._local_size)
        # Nothing is received, but the result has to use it: after a mere control dependency, or one through its shape,
        # Grappler removes the all-to-all, because Horovod's operations are not declared stateful.
        return tf.ensure_shape(tf.concat([received, flat], axis=0), flat.shape)

    def all_reduce(self, flat, name):
        return all_reduce(self._masters, flat, f"{name}_masters") if self._is_master else flat

    def broadcast(self, flat, name):
        """Returns the master's vector on all ranks of the node."""
        return hvd.broadcast(flat, hvd.rank() - hvd.rank() % self._local_size, process_set=self._node,
                             name=f"{name}_broadcast", ignore_name_scope=True)

    @property
    def _node(self):
        return self._nodes[hvd.rank() // self._local_size]

    @property
    def _is_master(self) -> bool:
        return hvd.rank() % self._local_size == 0
