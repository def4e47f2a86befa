"""The exchange between workers: Horovod's DistributedOptimizer round an optimizer, and averages of other variables."""
import contextlib
from dataclasses import dataclass, replace
from functools import partial

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import tensorflow as tf

from optim import float16
from optim.torus import AllToAll, ProcessSets, Torus, dense_buckets

COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
FUSION_MB = 32  # a quarter of Horovod's 128: a ResNet-50's gradients set out in four parts, not in one at the end
LossScaleOptimizer = tf.keras.mixed_precision.LossScaleOptimizer


def distributed(optimizer, compression: str = "none", loss_scaling: bool = False, fusion_mb: float | None = None):
    """The optimizer in Horovod's wrap, and round that, for float16, Keras's dynamic loss scale.

    One update is: `scale` the loss, sum the gradients of the micro-batches, `average` them, `apply_gradients`. The
    wrap's apply_gradients by itself exchanges nothing.
    """
    wrapped = hvd_keras.DistributedOptimizer(optimizer, compression=COMPRESSIONS[compression], op=hvd.Sum)
    wrapped.wire = Wire(COMPRESSIONS[compression], int((fusion_mb or FUSION_MB) * 2**20))
    connect(wrapped, None)
    if isinstance(wrapped, tf.keras.optimizers.legacy.Optimizer):  # keeps a number, where we assign at every step
        wrapped.learning_rate = tf.Variable(0.0, trainable=False)
    return LossScaleOptimizer(wrapped) if loss_scaling else wrapped


@dataclass(frozen=True)
class Wire:
    """How a wrapped optimizer exchanges. links: a torus's steps, or None for a ring."""

    compression: type
    fusion_bytes: int
    links: ProcessSets | AllToAll | None = None

    def maximum(self, values, name):
        """The largest over the workers of each value, in a vector."""
        return self.links.maximum(values, name) if self.links else hvd.allreduce(values, op=hvd.Max, name=name)


def connect(optimizer, links: ProcessSets | AllToAll | None) -> None:
    """Has the wrap sum gradients on a torus; or, with None, in a ring again. What was compiled before keeps its way.

    Horovod has no hook for this: `_allreduce_grads` (horovod/_keras/__init__.py) is set here and nowhere else.
    """
    wrapped = inner(optimizer)
    wire = wrapped.wire = replace(wrapped.wire, links=links)
    wrapped._allreduce_grads = (Torus(links, hvd.size(), wire.compression, wire.fusion_bytes) if links else
                                partial(_ring, compression=wire.compression))


def _ring(gradients, variables=None, *, compression) -> list:
    """The sum over the workers of each gradient, by Horovod's all-reduce.

    Horovod's own function wraps each in a tf.cond on the number of workers, and is converted by AutoGraph: most of the
    seconds that tracing a step took. A step is traced anew where that number changes, so it need not ask.
    """
    del variables
    if hvd.size() == 1:
        return list(gradients)
    return [hvd.allreduce(one, op=hvd.Sum, compression=compression, name=f"gradient_{number}")
            for number, one in enumerate(gradients)]


def inner(optimizer):
    """The optimizer without its loss scale: the one that has a learning rate and a momentum."""
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer


def build(optimizer, trainable_variables) -> None:
    """Makes the optimizer's variables. Raises ValueError where it refuses these."""
    make = getattr(inner(optimizer), "build", None) or inner(optimizer)._create_all_weights  # LAMB is of the older kind
    make(trainable_variables)


def variables(optimizer) -> list:
    """All that a checkpoint has to hold of a built optimizer: buffers, the number of updates, the loss scale."""
    own = list(inner(optimizer).variables())
    if isinstance(optimizer, LossScaleOptimizer):  # `loss_scale` is the value; nothing public gives the variable
        own += [optimizer._loss_scale.current_loss_scale, optimizer.dynamic_counter]
    return own


def scale(optimizer, loss):
    return optimizer.get_scaled_loss(loss) if isinstance(optimizer, LossScaleOptimizer) else loss


def average(optimizer, gradients, variables) -> list:
    """The gradients averaged over the workers, in one exchange, and then unscaled.

    An overflow on one worker makes the average infinite on all, so that the loss scale's check, which comes later in
    apply_gradients, skips the step and lowers the scale on all alike.
    """
    wrapped = inner(optimizer)
    shares = [1 / hvd.size()] * len(gradients)
    if hvd.size() > 1 and wrapped.wire.compression is hvd.Compression.fp16:
        gradients, shares = _for_float16(wrapped.wire, gradients)
    summed = [g for g, _ in wrapped.compute_gradients(None, variables, tape=_Summed(gradients))]
    averaged = summed if hvd.size() == 1 else [
        tf.math.scalar_mul(share, one) for share, one in zip(shares, summed, strict=True)]
    return optimizer.get_unscaled_gradients(averaged) if isinstance(optimizer, LossScaleOptimizer) else averaged


def _for_float16(wire, gradients) -> tuple[list, list]:
    """(the gradients, each with its scale; what to multiply each sum with for the mean). Slices stay in float32."""
    scaled, shares = list(gradients), [1 / hvd.size()] * len(gradients)
    for order, bucket in enumerate(dense_buckets(gradients, wire.fusion_bytes)):
        powers = float16.scales([gradients[number] for number in bucket], hvd.size(),
                                partial(wire.maximum, name=f"magnitudes_{order}"))
        for number, power in zip(bucket, tf.unstack(powers, len(bucket)), strict=True):
            scaled[number], shares[number] = gradients[number] * power, 1 / power / hvd.size()
    return scaled, shares


class _Summed(contextlib.nullcontext):
    """Gradients that are already there, in the shape of the tape that Horovod's compute_gradients asks for them."""

    def __init__(self, gradients):
        super().__init__()
        self._gradients = list(gradients)

    def gradient(self, loss, variables, *_):
        del loss, variables
        return self._gradients


def average_tensors(tensors, name: str) -> list:
    """The mean over the workers of each tensor, float32, all in one exchange."""
    if hvd.size() == 1:
        return [tf.cast(t, tf.float32) for t in tensors]
    flat = tf.concat([tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors], axis=0)
    flat = hvd.allreduce(flat, op=hvd.Average, name=name)
    parts = tf.split(flat, [t.shape.num_elements() for t in tensors])
    return [tf.reshape(part, t.shape) for part, t in zip(parts, tensors, strict=True)]


def average_variables(variables) -> None:
    """Sets each floating-point variable to its mean over the workers.

    Batch norm's moving statistics are each worker's own; left so, workers, evaluation and checkpoints disagree.
    """
    variables = [v for v in variables if v.dtype.is_floating]
    if hvd.size() == 1 or not variables:  # not an assignment to itself of each
        return
    for variable, mean in zip(variables, average_tensors(variables, "moving_statistics"), strict=True):
        variable.assign(tf.cast(mean, variable.dtype))
