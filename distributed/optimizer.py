"""An optimizer in Horovod's DistributedOptimizer and, for float16, in Keras's dynamic loss scale around that.

One update is: `scale` the loss, sum the gradients of the micro-batches, `average` them, `apply_gradients`. The wrap's
apply_gradients by itself exchanges nothing.
"""
import horovod.tensorflow.keras as hvd_keras
import tensorflow as tf

from distributed.exchange import GradientExchange

LossScaleOptimizer = tf.keras.mixed_precision.LossScaleOptimizer


def distributed(optimizer, exchange: GradientExchange, loss_scaling: bool = False):
    """The optimizer, wrapped. Nothing may subclass what is returned: Horovod calls super(self.__class__, self)."""
    wrapped = hvd_keras.DistributedOptimizer(optimizer)
    if isinstance(wrapped, tf.keras.optimizers.legacy.Optimizer):  # keeps a number, where we assign at every step
        wrapped.learning_rate = tf.Variable(0.0, trainable=False)
    set_exchange(wrapped, exchange)
    return LossScaleOptimizer(wrapped) if loss_scaling else wrapped


def set_exchange(optimizer, exchange: GradientExchange) -> None:
    """Has the wrap average gradients by `exchange`. What was compiled before keeps its way.

    Horovod has no hook for this: `_allreduce_grads` (horovod/_keras/__init__.py) is set here and nowhere else. Its own
    function wraps each gradient in a tf.cond on the number of workers and is converted by AutoGraph, which took most
    of the seconds that tracing a step took.
    """
    inner(optimizer)._allreduce_grads = exchange


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

    `_allreduce` is where DistributedOptimizer's own compute_gradients hands over gradients, too; ours are already
    there. An overflow on one worker makes the average infinite on all, so that the loss scale's check, which comes
    later in apply_gradients, skips the step and lowers the scale on all alike.
    """
    averaged = inner(optimizer)._allreduce(gradients, variables)
    return optimizer.get_unscaled_gradients(averaged) if isinstance(optimizer, LossScaleOptimizer) else averaged
