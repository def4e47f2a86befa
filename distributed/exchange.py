"""The gradient exchange: a callable with which Horovod's DistributedOptimizer averages gradients.

It makes one pass over buckets of gradients. It sums each bucket over the workers (ring, torus, hierarchical or tree).
Whoever uses the sums multiplies them to get means. If gradients are compressed to float16, each is scaled to fit
(float16.py).
"""
import os
from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from distributed import float16
from distributed.allreduce_plan import ALL_TO_ALL, NCCL, NCCL_AND_MPI, PROCESS_SETS, RING, AllreducePlan
from distributed.hierarchical import Hierarchical
from distributed.torus import AllToAll, ProcessSets, Stepwise
from distributed.world import on_one_vector
from optim.stacks import largest_of, norms_of

COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
HOROVODS_OWN = {NCCL: "HOROVOD_TORUS_ALLREDUCE", NCCL_AND_MPI: "HOROVOD_HIERARCHICAL_ALLREDUCE"}
FUSION_MB = 32  # except in a ring; a quarter of Horovod's 128, so ResNet-50's gradients make four buckets, not one


class Ring:
    """Horovod's own all-reduce: a ring, or the algorithm that Horovod is set to (HOROVODS_OWN)."""

    process_sets = ()

    def sum(self, tensors, compression, name):
        """Sums each tensor over the workers; compressed in transit. Horovod fuses the tensors in its own buffer."""
        return [hvd.allreduce(one, op=hvd.Sum, compression=compression, name=f"{name}_{number}")
                for number, one in enumerate(tensors)]


def make_collectives(plan: AllreducePlan, nccl: bool) -> Ring | Stepwise:
    """Returns the collectives of an all-reduce plan.

    Call it before Horovod starts, because it may enable Horovod's own algorithm. nccl: whether Horovod uses NCCL. The
    torus on process sets then uses Horovod's reduce-scatter, which is fast on NCCL.
    """
    if plan.backend in HOROVODS_OWN:
        os.environ[HOROVODS_OWN[plan.backend]] = "1"
    if plan.backend == PROCESS_SETS:
        return Hierarchical(*plan.grid) if plan.allreduce == "hierarchical" else ProcessSets(*plan.grid, rings=nccl)
    return AllToAll(*plan.grid) if plan.backend == ALL_TO_ALL else Ring()  # a tree is a torus of one row


class GradientExchange:
    """Averages gradients over the workers. It has the signature of DistributedOptimizer's own exchange.

    collectives: sums a bucket. Default: Ring. compression: "none" or "fp16", in transit. fusion_mb: maximum size of a
    bucket in MB, before compression. Default: FUSION_MB. Buckets do not affect a ring, because Ring sums each tensor
    separately and Horovod fuses them. plan: the plan of the collectives.
    """

    def __init__(self, collectives: Ring | Stepwise | None = None, compression: str = "none",
                 fusion_mb: float | None = None, plan: AllreducePlan = RING):
        self.plan = plan
        self._collectives = collectives or Ring()
        self._compression = COMPRESSIONS[compression]
        self._fusion_bytes = int((fusion_mb or FUSION_MB) * 2**20)

    @property
    def process_sets(self) -> Sequence:
        """The process sets to pass to hvd.init."""
        return self._collectives.process_sets

    def __call__(self, gradients, variables=None) -> list:
        """Returns the mean of each gradient over the workers, identical on all of them. Not compressed."""
        del variables
        if hvd.size() == 1:
            return list(gradients)
        return [tf.math.scalar_mul(1 / hvd.size(), one)
                for one in self._summed([*map(tf.convert_to_tensor, gradients)], "bucket", hvd.Compression.none)]

    def sums(self, gradients, count: int, scales: tf.Variable) -> tuple[list, tf.Tensor, tf.Tensor]:
        """Returns (sums of the gradients over the workers, factors that turn them into means, norms of the sums).

        count: number of terms in the sums. scales: those of distributed.float16, which are updated if gradients are
        compressed, float32 (gradients,). The factors, float32 (gradients,), are then 1 / (count * scale), and otherwise
        1 / count. norms: float32 (gradients,). All results are identical on all workers. The number of workers can be a
        constant in the graph, because a step is retraced when it changes. IndexedSlices become dense.
        """
        if hvd.size() == 1:
            return list(gradients), tf.fill([len(gradients)], 1 / count), norms_of(gradients)
        gradients = [*map(tf.convert_to_tensor, gradients)]
        if self._compression is hvd.Compression.none:
            sums = self._summed(gradients, "bucket", self._compression)
            return sums, tf.fill([len(sums)], 1 / count), norms_of(sums)
        used = scales.read_value()
        scaled = [scale * one for scale, one in zip(tf.unstack(used, len(gradients)), gradients, strict=True)]
        sums = self._summed(scaled, "bucket", self._compression)
        norms = norms_of(sums)

        def again():
            exact = self._summed(gradients, "again", hvd.Compression.none)
            return exact, tf.ones_like(used), norms_of(exact)

        sums, used, norms = tf.cond(
            tf.reduce_all(tf.math.is_finite(norms)), lambda: (sums, used, norms), again)
        [magnitudes] = self.sum([largest_of(gradients)], "magnitudes")
        scales.assign(float16.scales(magnitudes))
        return sums, 1 / (count * used), norms

    def sum(self, tensors, name: str) -> list:
        """Returns the sum of each tensor over the workers, in float32, with one message along the gradients' path."""
        if hvd.size() == 1:
            return [tf.cast(one, tf.float32) for one in tensors]
        return on_one_vector(tensors, lambda flat: self._collectives.sum([flat], hvd.Compression.none, name)[0])

    def _summed(self, tensors, name: str, compression) -> list:
        """Sums dense tensors over the workers, bucket by bucket."""
        sums = {}
        for order, bucket in enumerate(dense_buckets(tensors, self._fusion_bytes)):
            summed = self._collectives.sum([tensors[number] for number in bucket], compression, f"{name}_{order}")
            sums |= zip(bucket, summed, strict=True)
        return [sums[number] for number in range(len(tensors))]


def dense_buckets(tensors, limit: int) -> list[list[int]]:
    """Returns the buckets of tensors, as indices. limit: in bytes; see `buckets`."""
    return buckets([one.shape.num_elements() * one.dtype.size for one in tensors], limit)


def buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Groups indices from the last to the first into buckets. A bucket exceeds `limit` only if it is a single tensor.

    The backward pass computes gradients from the last layer to the first. A bucket can therefore be sent while the
    gradients of the next ones are still being computed.
    """
    made, room = [], 0
    for position in reversed(range(len(sizes))):
        if not made or sizes[position] > room:
            made.append([])
            room = limit
        made[-1].append(position)
        room -= sizes[position]
    return made
