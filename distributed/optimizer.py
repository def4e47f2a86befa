"""Wraps an optimizer in Horovod's DistributedOptimizer and, for float16, in Keras's LossScaleOptimizer.

An update has these steps: `scale` the loss, sum the gradients of the micro-batches, `average` them, `apply` them.
The wrapper's apply_gradients itself exchanges nothing.
"""
import horovod.tensorflow.keras as hvd_keras
import tensorflow as tf

from distributed import float16
from distributed.exchange import GradientExchange
from optim.lars import SGD
from optim.scaled import Scaled

LossScaleOptimizer = tf.keras.mixed_precision.LossScaleOptimizer


def wrap(optimizer, exchange: GradientExchange, loss_scaling: bool = False, loss_scale: float | None = None):
    """Returns the wrapped optimizer. Do not subclass its class: Horovod calls super(self.__class__, self).

    loss_scale: a fixed one; None: dynamic.
    """
    wrapped = hvd_keras.DistributedOptimizer(optimizer)
    if isinstance(wrapped, tf.keras.optimizers.legacy.Optimizer):  # holds a number, but each step assigns
        wrapped.learning_rate = tf.Variable(0.0, trainable=False)
    set_exchange(wrapped, exchange)
    if not loss_scaling:
        return wrapped
    return LossScaleOptimizer(wrapped, **({"dynamic": False, "initial_scale": loss_scale} if loss_scale else {}))


def set_exchange(optimizer, exchange: GradientExchange) -> None:
    """Makes the wrapper average gradients with `exchange`. Functions that were traced before do not change.

    Horovod has no hook for this, so `_allreduce_grads` (horovod/_keras/__init__.py) is set here and nowhere else.
    Horovod's own function wraps each gradient in a tf.cond on the number of workers, and AutoGraph converts it. That
    took most of the time of tracing a step.
    """
    inner(optimizer)._allreduce_grads = exchange


def inner(optimizer):
    """Returns the optimizer inside a LossScaleOptimizer: the one with the learning rate and the momentum."""
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer


def build(optimizer, trainable_variables) -> None:
    """Creates the optimizer's variables. Raises ValueError if it refuses the trainable variables."""
    own = inner(optimizer)
    make = getattr(own, "build", None) or own._create_all_weights  # LAMB has the older API
    make(trainable_variables)
    own.wire_scales = tf.Variable(tf.fill([len(trainable_variables)], float16.UNKNOWN), False, name="wire_scales")


def variables(optimizer) -> list:
    """Returns the variables of a built optimizer for a checkpoint: buffers, number of updates, scales."""
    own = [*inner(optimizer).variables(), inner(optimizer).wire_scales]
    if has_dynamic_scale(optimizer):  # `loss_scale` is the value; no public attribute is the variable
        own += [optimizer._loss_scale.current_loss_scale, optimizer.dynamic_counter]
    return own


def has_dynamic_scale(optimizer) -> bool:
    return isinstance(optimizer, LossScaleOptimizer) and optimizer.dynamic


def workers() -> int:
    return hvd_keras.size()


def scale(optimizer, loss):
    return optimizer.get_scaled_loss(loss) if isinstance(optimizer, LossScaleOptimizer) else loss


def average(optimizer, gradients, count: int) -> tuple[list[Scaled], tf.Tensor]:
    """Sums the gradients over the workers in one exchange, divides by `count` and unscales. Returns also their norms.

    count: number of micro-batches that the sums over all workers contain. norms: float32 (gradients,). No gradient is
    multiplied: the count, the loss scale and the scales of compressed gradients are one factor of each. An overflow on
    one worker makes the sum, and so the norm, infinite or NaN on all of them.
    """
    own = inner(optimizer)
    sums, factors, norms = own._allreduce_grads.sums(gradients, count, own.wire_scales)
    if isinstance(optimizer, LossScaleOptimizer):
        factors /= optimizer.loss_scale
    norms *= factors
    each = zip(sums, tf.unstack(factors, len(sums)), tf.unstack(norms, len(sums)), strict=True)
    return [Scaled(*one) for one in each], norms


def apply(optimizer, gradients: list[Scaled], norms: tf.Tensor, variables) -> None:
    """Updates the variables, or skips the update and lowers the loss scale if a norm is not finite.

    gradients, norms: of `average`. Keras's LossScaleOptimizer would test each element of each gradient. An optimizer
    that is not ours gets tensors.
    """
    own = inner(optimizer)
    if not isinstance(own, SGD):
        optimizer.apply_gradients([(one.value, variable) for one, variable in zip(gradients, variables, strict=True)])
    elif has_dynamic_scale(optimizer):
        _, is_finite = optimizer._loss_scale.update([norms])
        tf.cond(is_finite, lambda: own.apply_gradients(zip(gradients, variables, strict=True)),
                lambda: own.iterations.assign_add(1))
    else:
        own.apply_gradients(zip(gradients, variables, strict=True))


def sum_over_workers(optimizer, tensors, name: str) -> list:
    """Returns the sum of each tensor over the workers, in float32; see GradientExchange.sum."""
    return inner(optimizer)._allreduce_grads.sum(tensors, name)
