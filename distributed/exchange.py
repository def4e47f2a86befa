"""The gradient exchange: a callable with which Horovod's DistributedOptimizer averages gradients.

It makes one pass over buckets of gradients. It sums each bucket over the workers (ring, torus or hierarchical). Whoever
uses the sums multiplies them to get means. If gradients are compressed to float16, it first scales each of them to fit
(float16.py).
"""
import os
from collections.abc import Sequence
from functools import partial

import horovod.tensorflow as hvd
import tensorflow as tf

from distributed import float16
from distributed.allreduce_plan import ALL_TO_ALL, NCCL, NCCL_AND_MPI, PROCESS_SETS, RING, AllreducePlan
from distributed.hierarchical import Hierarchical
from distributed.torus import AllToAll, ProcessSets, Stepwise
from distributed.world import on_one_vector

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

    def maximum(self, values, name):
        """Returns the element-wise maximum of a vector over the workers."""
        return hvd.allreduce(values, op=hvd.Max, name=name)


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
        """Returns the mean of each gradient over the workers, identical on all of them."""
        del variables
        if hvd.size() == 1:
            return list(gradients)
        sums, factors = self.sums(gradients, hvd.size())
        return [tf.math.scalar_mul(factor, one)
                for factor, one in zip(tf.unstack(factors, len(sums)), sums, strict=True)]

    def sums(self, gradients, count: int) -> tuple[list, tf.Tensor]:
        """Returns (the sum of each gradient over the workers, the factors that turn sums into means), float32.

        count: number of terms in the sums. The factors, of shape (gradients,), are 1 / count, except if gradients are
        compressed to float16. All results are identical on all workers. The number of workers can be a constant in the
        graph, because a step is retraced when it changes. IndexedSlices are gathered, not summed: every rank needs the
        rows of all others.
        """
        if hvd.size() == 1:
            return list(gradients), tf.fill([len(gradients)], 1 / count)
        sums = [hvd.allreduce(one, op=hvd.Sum, name=f"slices_{number}") if isinstance(one, tf.IndexedSlices) else None
                for number, one in enumerate(gradients)]
        buckets = dense_buckets(gradients, self._fusion_bytes)
        dense = [number for bucket in buckets for number in bucket]
        prescale = self._prescale(gradients, dense)
        for order, bucket in enumerate(buckets):
            tensors = [gradients[number] * prescale[number] if prescale else gradients[number] for number in bucket]
            summed = self._collectives.sum(tensors, self._compression, f"bucket_{order}")
            for number, one in zip(bucket, summed, strict=True):
                sums[number] = one
        if not prescale:
            return sums, tf.fill([len(sums)], 1 / count)
        return sums, 1 / (count * tf.stack([prescale.get(number, 1.0) for number in range(len(sums))]))

    def sum(self, tensors, name: str) -> list:
        """Returns the sum of each tensor over the workers, in float32, with one message along the gradients' path."""
        if hvd.size() == 1:
            return [tf.cast(one, tf.float32) for one in tensors]
        return on_one_vector(tensors, lambda flat: self._collectives.sum([flat], hvd.Compression.none, name)[0])

    def _prescale(self, gradients, dense: list[int]) -> dict[int, tf.Tensor]:
        """Returns the factors of the dense gradients before the sum, by index. There are some only for float16."""
        if self._compression is not hvd.Compression.fp16 or not dense:
            return {}
        maximum = partial(self._collectives.maximum, name="magnitudes")
        scales = float16.scales([gradients[number] for number in dense], hvd.size(), maximum)
        return dict(zip(dense, tf.unstack(scales, len(dense)), strict=True))


def dense_buckets(gradients, limit: int) -> list[list[int]]:
    """Returns the buckets of the gradients that are not IndexedSlices, as indices. limit: in bytes; see `buckets`."""
    dense = [number for number, one in enumerate(gradients) if not isinstance(one, tf.IndexedSlices)]
    sizes = [gradients[number].shape.num_elements() * gradients[number].dtype.size for number in dense]
    return [[dense[index] for index in bucket] for bucket in buckets(sizes, limit)]


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
