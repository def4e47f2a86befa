"""Wraps an optimizer in Horovod's DistributedOptimizer and, for float16, in Keras's LossScaleOptimizer.

In Keras's own `fit`, Horovod's wrapper exchanges the gradients as soon as they are computed, after `set_exchange` with
a GradientExchange. The wrapper's apply_gradients exchanges nothing. The step of train.py (training/step.py) therefore
calls its GradientExchange first, and then apply_gradients.
"""
import horovod.tensorflow.keras as hvd_keras
import tensorflow as tf

from distributed.exchange import GradientExchange

LossScaleOptimizer = tf.keras.mixed_precision.LossScaleOptimizer


def wrap(optimizer, loss_scaling: bool = False, loss_scale: float | None = None):
    """Returns the wrapped optimizer. Do not subclass its class: Horovod calls super(self.__class__, self).

    loss_scale: a fixed one; None: dynamic.
    """
    wrapped = hvd_keras.DistributedOptimizer(optimizer)
    if isinstance(wrapped, tf.keras.optimizers.legacy.Optimizer):  # holds a number, but each step assigns
        wrapped.learning_rate = tf.Variable(0.0, trainable=False)
    if not loss_scaling:
        return wrapped
    return LossScaleOptimizer(wrapped, **({"dynamic": False, "initial_scale": loss_scale} if loss_scale else {}))


def set_exchange(optimizer, exchange: GradientExchange) -> None:
    """Makes Keras's `fit` average gradients with `exchange`. Functions that were traced before do not change.

    Horovod has no hook for this, so `_allreduce_grads` (horovod/_keras/__init__.py) is set here and nowhere else.
    """
    inner(optimizer)._allreduce_grads = exchange


def inner(optimizer):
    """Returns the optimizer inside a LossScaleOptimizer: the one with the learning rate and the momentum."""
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer


def build(optimizer, trainable_variables) -> None:
    """Creates the optimizer's variables. Raises ValueError if it refuses the trainable variables."""
    wrapped = inner(optimizer)
    make = getattr(wrapped, "build", None) or wrapped._create_all_weights  # LAMB has the older API
    make(trainable_variables)


def variables(optimizer, exchange_scales: tf.Variable) -> list:
    """Returns the variables of a built optimizer for a checkpoint: buffers, number of updates, and the loss scale.

    exchange_scales: those of GradientExchange, which checkpoints list before the loss scale.
    """
    own = [*inner(optimizer).variables(), exchange_scales]
    if has_dynamic_scale(optimizer):  # `loss_scale` is the value; no public attribute is the variable
        own += [optimizer._loss_scale.current_loss_scale, optimizer.dynamic_counter]
    return own


def has_dynamic_scale(optimizer) -> bool:
    """Whether the loss scale adapts, and skips updates whose gradients are not finite."""
    return isinstance(optimizer, LossScaleOptimizer) and optimizer.dynamic


def scale(optimizer, loss):
    """Returns the loss times the loss scale, if there is one."""
    return optimizer.get_scaled_loss(loss) if isinstance(optimizer, LossScaleOptimizer) else loss


def assign_rates(optimizer, learning_rate, momentum) -> None:
    """Assigns the rates of the next update. An optimizer of Keras's own keeps its momentum, which is a number there."""
    wrapped = inner(optimizer)
    wrapped.learning_rate.assign(learning_rate)
    if isinstance(getattr(wrapped, "momentum", None), tf.Variable):
        wrapped.momentum.assign(momentum)
