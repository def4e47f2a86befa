"""The exchange of gradients: one callable, which Horovod's DistributedOptimizer averages gradients by.

One pass over buckets of gradients: scaled to fit float16 where that goes over the wire, summed over the workers in a
ring or a torus, and multiplied by what makes the sums means.
"""
import os
from collections.abc import Sequence
from functools import partial

import horovod.tensorflow as hvd
import tensorflow as tf

from distributed import float16
from distributed.allreduce_plan import ALL_TO_ALL, NCCL, PROCESS_SETS, AllreducePlan
from distributed.torus import AllToAll, ProcessSets

COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
FUSION_MB = 32  # a quarter of Horovod's 128: a ResNet-50's gradients set out in four parts, not in one at the end


class Ring:
    """Horovod's own all-reduce: in a ring, or by whatever else it takes, such as NCCL's torus."""

    process_sets = ()

    def sum(self, tensors, compression, name):
        """The sum over the workers of each tensor, compressed on the wire."""
        return [hvd.allreduce(one, op=hvd.Sum, compression=compression, name=f"{name}_{number}")
                for number, one in enumerate(tensors)]

    def maximum(self, values, name):
        """The largest over the workers of each value, in a vector."""
        return hvd.allreduce(values, op=hvd.Max, name=name)


def make_collectives(plan: AllreducePlan, nccl: bool) -> Ring | ProcessSets | AllToAll:
    """How a plan has buckets summed. Has Horovod, when it starts, take its own torus where the plan is that.

    nccl: whether Horovod exchanges by NCCL, whose reduce-scatter is a good one.
    """
    if plan.backend == NCCL:
        os.environ["HOROVOD_TORUS_ALLREDUCE"] = "1"
    if plan.backend == PROCESS_SETS:
        return ProcessSets(*plan.grid, rings=nccl)
    return AllToAll(*plan.grid) if plan.backend == ALL_TO_ALL else Ring()


class GradientExchange:
    """Averages gradients over the workers; called as DistributedOptimizer calls its own exchange.

    collectives: how a bucket is summed. compression: "none" or "fp16", on the wire. fusion_mb: of a bucket, in MB
    before compression; FUSION_MB by default.
    """

    def __init__(self, collectives: Ring | ProcessSets | AllToAll | None = None, compression: str = "none",
                 fusion_mb: float | None = None):
        self._collectives, self._compression = collectives or Ring(), COMPRESSIONS[compression]
        self._fusion_bytes = int((fusion_mb or FUSION_MB) * 2**20)

    @property
    def process_sets(self) -> Sequence:
        """Those that Horovod has to be started with."""
        return self._collectives.process_sets

    def __call__(self, gradients, variables=None) -> list:
        """The mean over the workers of each gradient, alike on all of them.

        A step is traced anew where the number of workers changes, so none is asked for in the graph. IndexedSlices
        are gathered and not summed: every rank needs every other's rows.
        """
        del variables
        if hvd.size() == 1:
            return list(gradients)
        means = [self._mean_of_slices(one, f"slices_{number}") if isinstance(one, tf.IndexedSlices) else None
                 for number, one in enumerate(gradients)]
        buckets = dense_buckets(gradients, self._fusion_bytes)
        scales, shares = self._scales(gradients, [number for bucket in buckets for number in bucket])
        for order, bucket in enumerate(buckets):
            tensors = [gradients[number] * scales[number] if scales else gradients[number] for number in bucket]
            summed = self._collectives.sum(tensors, self._compression, f"bucket_{order}")
            for number, one in zip(bucket, summed, strict=True):
                means[number] = tf.math.scalar_mul(shares[number], one)
        return means

    def _scales(self, gradients, dense: list[int]) -> tuple[dict, dict]:
        """(what each dense gradient is multiplied by before it is summed, if anything; what after), by position."""
        if self._compression is not hvd.Compression.fp16 or not dense:
            return {}, dict.fromkeys(dense, 1 / hvd.size())
        maximum = partial(self._collectives.maximum, name="magnitudes")
        scales = float16.scales([gradients[number] for number in dense], hvd.size(), maximum)
        return tuple(dict(zip(dense, tf.unstack(one, len(dense)), strict=True))
                     for one in (scales, 1 / (scales * hvd.size())))

    def _mean_of_slices(self, slices, name):
        return tf.math.scalar_mul(1 / hvd.size(), hvd.allreduce(slices, op=hvd.Sum, name=name))


def dense_buckets(gradients, limit: int) -> list[list[int]]:
    """Buckets of at most `limit` bytes, as positions among the gradients; IndexedSlices are in none."""
    dense = [number for number, one in enumerate(gradients) if not isinstance(one, tf.IndexedSlices)]
    sizes = [gradients[number].shape.num_elements() * gradients[number].dtype.size for number in dense]
    return [[dense[index] for index in bucket] for bucket in buckets(sizes, limit)]


def buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Lists of consecutive positions, from the last to the first, each of `limit` in all or of a single larger one.

    The backward pass gives gradients from the last layer's to the first's, so that a bucket is full, and can be sent,
    while those after it are still being computed.
    """
    made, room = [], 0
    for position in reversed(range(len(sizes))):
        if not made or sizes[position] > room:
            made.append([])
            room = limit
        made[-1].append(position)
        room -= sizes[position]
    return made
