"""The gradient exchange: sums gradients over the workers.

It groups the gradients into buckets and sums each bucket over the workers (ring, torus or hierarchical). It returns
sums, each with the factor that makes it a mean, and the optimizer applies that factor (optim.stacks.Scaled). If
gradients are compressed to float16, each is scaled to fit (float16.py). As a callable, it is what Horovod's
DistributedOptimizer averages gradients with in Keras's `fit`.

Horovod pairs messages by name. TensorFlow puts the name of a loop or condition, with a number, before the names of the
operations in it. Workers with different numbers of micro-batches have other loops in their steps, so messages are named
without these scopes (ignore_name_scope).
"""
import os
from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from distributed import float16
from distributed.fixed_point import FLOAT32, FixedPoint, Float32
from distributed.hierarchical import Hierarchical
from distributed.torus import AllToAll, ProcessSets, Stepwise
from optim.stacks import largest_of, norms_of
from plan.allreduce import ALL_TO_ALL, NCCL, NCCL_AND_MPI, PROCESS_SETS, RING, AllreducePlan

COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
HOROVODS_OWN = {NCCL: "HOROVOD_TORUS_ALLREDUCE", NCCL_AND_MPI: "HOROVOD_HIERARCHICAL_ALLREDUCE"}
FUSION_MB = 32  # a quarter of Horovod's 128, so ResNet-50's gradients make four buckets, not one


class Ring:
    """Horovod's own all-reduce: a ring, or the algorithm that Horovod is set to (HOROVODS_OWN)."""

    process_sets = ()
    least_buckets = 4  # so that the first is exchanged while the backward pass runs, in small models, too

    def sum(self, tensors, compression, name):
        """Sums each tensor over the workers, all of one dtype; compressed in transit.

        Horovod waits for all of them and fuses them in its own buffer. Of single tensors it would send those that
        happen to be ready in each of its cycles, often one.
        """
        return hvd.grouped_allreduce(tensors, op=hvd.Sum, compression=compression, name=name, ignore_name_scope=True)


def make_collectives(plan: AllreducePlan, nccl: bool) -> Ring | Stepwise:
    """Returns the collectives of an all-reduce plan.

    Call it before Horovod starts, because it may enable Horovod's own algorithm. nccl: whether Horovod uses NCCL. The
    torus on process sets then uses Horovod's reduce-scatter, which is fast on NCCL.
    """
    if plan.backend in HOROVODS_OWN:
        os.environ[HOROVODS_OWN[plan.backend]] = "1"
    if plan.backend == PROCESS_SETS:
        return Hierarchical(*plan.grid) if plan.allreduce == "hierarchical" else ProcessSets(*plan.grid, rings=nccl)
    return AllToAll(*plan.grid) if plan.backend == ALL_TO_ALL else Ring()


class GradientExchange:
    """Sums or averages gradients over the workers.

    collectives: sums a bucket. Default: Ring. compression: "none" or "fp16", in transit. fusion_mb: maximum size of a
    bucket in MB, before compression. Default: FUSION_MB. plan: the plan of the collectives.

    scales: distributed.float16's of the gradients. Set them before compressed gradients are exchanged. They belong to
    the state of a training, which outlives an exchange in elastic training.
    """

    scales: tf.Variable | None = None

    def __init__(self, collectives: Ring | Stepwise | None = None, compression: str = "none",
                 fusion_mb: float | None = None, plan: AllreducePlan = RING):
        self.plan = plan
        self._collectives = collectives or Ring()
        self._compression = COMPRESSIONS[compression]
        self._fusion_bytes = int((fusion_mb or FUSION_MB) * 2**20)

    @property
    def workers(self) -> int:
        """The number of workers that exchange gradients."""
        return hvd.size()

    @property
    def process_sets(self) -> Sequence:
        """The process sets to pass to hvd.init."""
        return self._collectives.process_sets

    def __call__(self, gradients, variables=None) -> list:
        """Returns the mean of each gradient over the workers, identical on all of them. Not compressed.

        Horovod's own function wraps each gradient in a tf.cond on the number of workers.
        """
        del variables
        if hvd.size() == 1:
            return list(gradients)
        summed = self._summed([*map(tf.convert_to_tensor, gradients)], "bucket", hvd.Compression.none)
        return [tf.math.scalar_mul(1 / hvd.size(), total) for total in summed]

    def sums(self, gradients, variables, count: int, form: Float32 | FixedPoint = FLOAT32) -> tuple[
            list, tf.Tensor, tf.Tensor]:
        """Returns (sums of the gradients over the workers, factors that turn them into means, norms of the sums).

        gradients: of the variables, the terms of `form` in `groups`; fixed point is never compressed. count: number of
        terms in the sums. The factors, float32 (gradients,), are 1 / count, or 1 / (count * scale) if gradients are
        compressed, which also updates `scales`. norms: float32 (gradients,). All results are identical on all workers.
        The number of workers can be a constant in the graph, because a step is retraced when it changes. IndexedSlices
        become dense.
        """
        if hvd.size() == 1 or isinstance(form, FixedPoint) or self._compression is hvd.Compression.none:
            if hvd.size() > 1:
                gradients = self._summed([*map(tf.convert_to_tensor, gradients)], "bucket", hvd.Compression.none)
            totals = form.totals(gradients, [variable.shape for variable in variables], self.groups(variables, form))
            return totals, tf.fill([len(totals)], 1 / count), norms_of(totals)
        gradients = [*map(tf.convert_to_tensor, gradients)]
        used = self.scales.read_value()
        scaled = [scale * gradient
                  for scale, gradient in zip(tf.unstack(used, len(gradients)), gradients, strict=True)]
        totals = self._summed(scaled, "bucket", self._compression)
        norms = norms_of(totals)

        def again():
            exact = self._summed(gradients, "again", hvd.Compression.none)
            return exact, tf.ones_like(used), norms_of(exact)

        totals, used, norms = tf.cond(
            tf.reduce_all(tf.math.is_finite(norms)), lambda: (totals, used, norms), again)
        [magnitudes] = self.sum([largest_of(gradients)], "magnitudes")
        self.scales.assign(float16.scales(magnitudes))
        return totals, 1 / (count * used), norms

    def gathered(self, tensors) -> list:
        """Returns float32 tensors of which one worker has each, and the others zeros. They keep their bits.

        On a worker that has none, all are constants, and Grappler would compute the message before the first step,
        once, because Horovod's operations are not declared stateful. So the value of a variable goes with them.
        """
        return self.sum([*tensors, self.scales.read_value()[:1]], "gathered")[:-1]

    def sum(self, tensors, name: str) -> list:
        """Returns the sum of each tensor over the workers, with one message along the gradients' path.

        The message is one vector of all tensors: int64 if all of them are, otherwise float32.
        """
        if hvd.size() == 1:
            return list(tensors)
        dtype = tf.int64 if all(t.dtype == tf.int64 for t in tensors) else tf.float32
        vector = tf.concat([tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors], axis=0)
        [total] = self._collectives.sum([vector], hvd.Compression.none, name)
        parts = tf.split(total, [t.shape.num_elements() for t in tensors])
        return [tf.reshape(part, t.shape) for part, t in zip(parts, tensors, strict=True)]

    def groups(self, variables, form: Float32 | FixedPoint) -> list[list[int]]:
        """Returns lists of indices of variables, for the `terms` of `form`. The gradients of each fill a bucket."""
        return self._buckets([variable.shape.num_elements() * form.bytes_per_value for variable in variables])[::-1]

    def _buckets(self, sizes: list[int]) -> list[list[int]]:
        return buckets(sizes, min(self._fusion_bytes, sum(sizes) // self._collectives.least_buckets))

    def _summed(self, tensors, name: str, compression) -> list:
        """Sums dense tensors over the workers, bucket by bucket."""
        sums = {}
        for order, bucket in enumerate(self._buckets([bytes_of(tensor) for tensor in tensors])):
            summed = self._collectives.sum([tensors[number] for number in bucket], compression, f"{name}_{order}")
            sums |= zip(bucket, summed, strict=True)
        return [sums[number] for number in range(len(tensors))]


def bytes_of(tensor) -> int:
    """Returns the size of a tensor of known shape."""
    return tensor.shape.num_elements() * tensor.dtype.size


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
