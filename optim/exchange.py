"""The exchange between workers: Horovod's DistributedOptimizer round an optimizer, and averages of other variables."""
import contextlib

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import tensorflow as tf

COMPRESSIONS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}


def distributed(optimizer, compression: str = "none"):
    """The optimizer in Horovod's wrap. Use `update`: its apply_gradients alone exchanges nothing."""
    wrapped = hvd_keras.DistributedOptimizer(optimizer, compression=COMPRESSIONS[compression])
    if isinstance(wrapped, tf.keras.optimizers.legacy.Optimizer):  # keeps a number, where we assign at every step
        wrapped.learning_rate = tf.Variable(0.0, trainable=False)
    return wrapped


def update(optimizer, gradients, variables) -> None:
    """One exchange and one step: averages the gradients over the workers and applies them."""
    averaged = optimizer.compute_gradients(None, variables, tape=_Summed(gradients))
    optimizer.apply_gradients(averaged)


class _Summed(contextlib.nullcontext):
    """Gradients that are already there, in the shape of the tape that Horovod's compute_gradients asks for them."""

    def __init__(self, gradients):
        super().__init__()
        self._gradients = list(gradients)

    def gradient(self, loss, variables, *_):
        del loss, variables
        return self._gradients


def average_variables(variables) -> None:
    """Sets each floating-point variable to its mean over the workers, in one exchange of float32.

    Batch norm's moving statistics are each worker's own; left so, workers, evaluation and checkpoints disagree.
    """
    variables = [v for v in variables if v.dtype.is_floating]
    if hvd.size() == 1 or not variables:
        return
    flat = tf.concat([tf.reshape(tf.cast(v, tf.float32), [-1]) for v in variables], axis=0)
    mean = hvd.allreduce(flat, op=hvd.Average, name="moving_statistics")
    for variable, part in zip(variables, tf.split(mean, [v.shape.num_elements() for v in variables]), strict=True):
        variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))
