"""Scales gradients so that they fit float16 while they are summed over the workers.

Horovod sums in the dtype that it sends. In float16, a gradient above 65,504 overflows, a sum of smaller ones may
overflow, too, and a gradient below 6e-8 becomes 0. Each gradient is therefore multiplied before the sum by a power of
two, and divided by it after the sum, in float32. The power brings the largest possible sum, (largest magnitude on any
worker) * workers, to between 2**13 and 2**15. Powers of two change no digit. The two bits left at the top are for the
rounding of partial sums: one addition can at most double what it adds.

The workers agree on the largest magnitude of each gradient in a single reduction of a few bytes per step. No bucket can
be sent before it, so the exchange does not overlap the backward pass. A reduction per bucket would not help on a GPU,
because the GPU scales the bucket after all operations of the backward pass that the host has launched by then. Infinity
and NaN are ignored in the magnitudes. They are sent as they are and make the sum infinite or NaN, which a loss scale
must see.
"""
import tensorflow as tf

from optim.stacks import largest_of

LARGEST_SUM = 15  # exponent of two
SMALLEST, LARGEST = 2.0 ** -126, 2.0 ** 100  # limits of the scales, whose inverses have to be float32, too
EXPONENT = 0x7F800000  # mask that turns the bits of a positive float32 1.xxx * 2**e into those of 2**e


def scales(gradients, workers: int, maximum) -> tf.Tensor:
    """Returns the power of two for each gradient, float32 (gradients,), the same on all workers.

    maximum: a function that returns the element-wise maximum of a float32 vector over all workers.
    """
    magnitudes = maximum(largest_of(gradients))
    # A bit mask, because a logarithm could differ in the last digit between machines. No integer arithmetic, because
    # TensorFlow adds int32 on the host, wherever the tensors are.
    powers = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(magnitudes, tf.int32), EXPONENT), tf.float32)
    largest = 2.0 ** (LARGEST_SUM - 1 - (workers - 1).bit_length())
    return tf.clip_by_value(largest / powers, SMALLEST, LARGEST)
