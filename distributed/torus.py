"""The 2D-torus all-reduce of arXiv:1811.05233, section 2.2, built from Horovod's collectives.

N = X * Y workers fill a grid row by row: rank = row * X + column. The ranks of a row are consecutive, and share a node
as far as possible. Each bucket of gradients, S bytes, is summed in three steps:

    1. reduce-scatter along rows: each rank gets the row's sum of one X-th       sends S * (X - 1) / X
    2. all-reduce along columns: of that X-th, the sum over all rows             sends S * 2 (Y - 1) / (X * Y)
    3. all-gather along rows: each rank gets the X - 1 parts that it lacks       sends S * (X - 1) / X

In total, each rank sends S * 2 (N - 1) / N, as in a ring. But there are 2 (X - 1) + 2 (Y - 1) consecutive messages
instead of a ring's 2 (N - 1), and those along a column carry an X-th of what a ring between nodes would. The paper
claims that with over a thousand GPUs, a ring spends so long on its many messages that it cannot use the bandwidth.

A bucket (--fusion_mb) holds gradients in the order in which the backward pass computes them. It is padded with zeros to
a multiple of N, and can be sent as soon as its own gradients are ready. Tensors keep the compressed dtype between the
steps. The grid determines the order of each sum. It is reproducible if Horovod does not fuse buckets
(HOROVOD_FUSION_THRESHOLD=0, which --deterministic sets). Otherwise Horovod fuses buckets that happen to be ready.
"""
import functools

import horovod.tensorflow as hvd
import tensorflow as tf


class Stepwise:
    """Sums a bucket as one vector, in the `steps` of a subclass: functions of (vector, name), in their order.

    multiple: the vector is padded with zeros to a multiple of it.
    """

    process_sets = ()
    least_buckets = multiple = 1

    def sum(self, tensors, compression, name):
        """Sums each tensor over the workers, all of one dtype; compressed in transit."""
        compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
        parts = [tf.reshape(tensor, [-1]) for tensor in compressed]
        sizes = [tensor.shape.num_elements() for tensor in compressed]
        if padding := -sum(sizes) % self.multiple:
            parts, sizes = [*parts, tf.zeros([padding], compressed[0].dtype)], [*sizes, padding]
        flat = tf.concat(parts, axis=0)  # a single tensor is not copied, neither here nor in the split
        for step in self.steps:
            flat = step(flat, name)
        parts = tf.split(flat, sizes)[:len(tensors)]
        return [compression.decompress(tf.reshape(part, tensor.shape), context)
                for part, tensor, context in zip(parts, tensors, contexts, strict=True)]


class Torus(Stepwise):
    """Sums a bucket in three steps, which a subclass implements: reduce_scatter, all_reduce, all_gather."""

    def __init__(self, horizontal: int, vertical: int):
        self._horizontal, self.multiple = horizontal, horizontal * vertical

    @property
    def steps(self):
        return self.reduce_scatter, self.all_reduce, self.all_gather


class ProcessSets(Torus):
    """The three steps as Horovod's collectives, on a process set for each row and each column.

    rings: whether to use Horovod's own reduce-scatter, which is fast on NCCL. Open MPI's allocates memory each time and
    is several times slower than the alternative: an all-to-all along the row, with the same bytes and messages. Each
    rank then sums the parts itself, in float32 and in rank order.

    Pass `process_sets` to hvd.init. (Horovod can also add sets later, with HOROVOD_DYNAMIC_PROCESS_SETS, but then all
    ranks agree on the number of sets in each of its cycles.)
    """

    def __init__(self, horizontal: int, vertical: int, rings: bool = False):
        super().__init__(horizontal, vertical)
        workers, self.rings = self.multiple, rings
        self._rows = [process_set(range(row * horizontal, (row + 1) * horizontal), workers)
                      for row in range(vertical)]
        self._columns = [process_set(range(column, workers, horizontal), workers) for column in range(horizontal)]
        self.process_sets = created([*self._rows, *self._columns])

    def reduce_scatter(self, flat, name):
        row, name = self._rows[hvd.rank() // self._horizontal], f"{name}_scatter"
        if row is None:
            return flat
        if self.rings:
            return hvd.reducescatter(flat, op=hvd.Sum, process_set=row, name=name, ignore_name_scope=True)
        splits = tf.fill([self._horizontal], flat.shape[0] // self._horizontal)
        received, _ = hvd.alltoall(flat, splits=splits, process_set=row, name=name, ignore_name_scope=True)
        return sum_of_parts(tf.ensure_shape(received, flat.shape), self._horizontal)

    def all_reduce(self, flat, name):
        return all_reduce(self._columns[hvd.rank() % self._horizontal], flat, f"{name}_column")

    def all_gather(self, flat, name):
        row = self._rows[hvd.rank() // self._horizontal]
        if row is None:
            return flat
        return hvd.allgather(flat, process_set=row, name=f"{name}_gather", ignore_name_scope=True)


@functools.cache
def process_set(ranks: range, workers: int):
    """Returns the process set of these ranks, or None for a single rank.

    All ranks are Horovod's global set, because Horovod refuses to create that set again.
    """
    if len(ranks) == 1:
        return None
    return hvd.global_process_set if len(ranks) == workers else hvd.ProcessSet(list(ranks))


def created(groups: list) -> list:
    """Returns the process sets among these groups that hvd.init has to create."""
    return [group for group in groups if group not in (None, hvd.global_process_set)]


def all_reduce(group, flat, name: str):
    """Sums over a process set; None is a single rank."""
    if group is None:
        return flat
    return hvd.allreduce(flat, op=hvd.Sum, process_set=group, name=name, ignore_name_scope=True)


def sum_of_parts(received, count: int):
    """Sums the `count` vectors that are concatenated in `received`, in their order, float16 in float32."""
    parts = tf.unstack(tf.reshape(received, [count, -1]))
    if received.dtype.is_floating:
        parts = [tf.cast(part, tf.float32) for part in parts]
    return tf.cast(functools.reduce(tf.add, parts), received.dtype)


class AllToAll(Torus):
    """The same steps, with the same bytes, as all-to-alls with zero-length splits for ranks outside the row or column.

    Elastic training uses it, because process sets are ruled out there (plan/allreduce.py).
    """

    @property
    def _row(self) -> range:
        first = hvd.rank() // self._horizontal * self._horizontal
        return range(first, first + self._horizontal)

    @property
    def _column(self) -> range:
        return range(hvd.rank() % self._horizontal, self.multiple, self._horizontal)

    def reduce_scatter(self, flat, name):
        return self._scatter(flat, self._row, f"{name}_scatter")

    def all_reduce(self, flat, name):
        if len(self._column) == 1:
            return flat
        return self._gather(self._scatter(flat, self._column, f"{name}_down"), self._column, f"{name}_up")

    def all_gather(self, flat, name):
        return self._gather(flat, self._row, f"{name}_gather")

    def _scatter(self, flat, ranks, name):
        return sum_of_parts(self._exchange(flat, flat.shape[0] // len(ranks), ranks, name), len(ranks))

    def _gather(self, flat, ranks, name):
        return self._exchange(tf.tile(flat, [len(ranks)]), flat.shape[0], ranks, name)

    def _exchange(self, flat, length, ranks, name):
        """Sends `length` values to each of the ranks, and receives as many from each, in rank order."""
        splits = [length if rank in ranks else 0 for rank in range(self.multiple)]
        received, _ = hvd.alltoall(flat, splits=tf.constant(splits, tf.int32), name=name, ignore_name_scope=True)
        return tf.ensure_shape(received, [length * len(ranks)])
