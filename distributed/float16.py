"""Gradients that fit float16 while they are summed over the workers: scaled before, so that none is lost.

Horovod sums in the type of the wire. A gradient above 65,504 would be infinite in float16, so would be a sum of smaller
ones, and one below 6e-8 nothing. So each gradient is multiplied, before, by the power of two that brings the largest
possible sum of its values, (largest magnitude on any worker) * workers, to between 2**13 and 2**15; and divided by it
after, in float32. Powers of two change no digit. The two bits left at the top are for the rounding of partial sums: one
addition can at most double what it adds.

The workers agree on the largest magnitudes, one for each gradient, in one reduction of some bytes for the whole step.
No bucket can be sent before, so that the exchange does not overlap the backward pass. A reduction for each bucket would
not help a GPU: it multiplies the bucket after all of the backward pass that the host has launched by then. Infinity and
NaN count as nothing there, go over the wire as what they are and make the sum infinite or NaN, which a loss scale must
see.
"""
import tensorflow as tf

from optim.stacks import largest_of

LARGEST_SUM = 15  # as a power of two
SMALLEST, LARGEST = 2.0 ** -126, 2.0 ** 100  # of the scales: their inverses have to be float32, too
EXPONENT = 0x7F800000  # the bits of a positive float32 1.xxx * 2**e that are those of 2**e


def scales(gradients, workers: int, maximum) -> tf.Tensor:
    """The power of two for each gradient, float32 (gradients,), the same on all workers.

    maximum: a function of a float32 vector that gives the largest over all workers, element by element.
    """
    magnitudes = maximum(largest_of(gradients))
    # By the bits: a logarithm could differ in the last digit between machines. And by nothing but the bits: TensorFlow
    # adds int32 on the host, wherever the numbers are.
    powers = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(magnitudes, tf.int32), EXPONENT), tf.float32)
    largest = 2.0 ** (LARGEST_SUM - 1 - (workers - 1).bit_length())
    return tf.clip_by_value(largest / powers, SMALLEST, LARGEST)
