"""Gradients that fit float16 while they are summed over the workers: scaled before, so that none is lost.

Horovod sums in the type of the wire. A gradient above 65,504 would be infinite in float16, so would be a sum of smaller
ones, and one below 6e-8 nothing. So each gradient is multiplied, before, by the power of two that brings the largest
possible sum of its values, (largest magnitude on any worker) * workers, to between 2**13 and 2**15; and divided by it
after, in float32. Powers of two change no digit. The two bits left at the top are for the rounding of partial sums: one
addition can at most double what it adds.

The workers agree on the largest magnitudes, one for each gradient, in a reduction of some bytes a bucket of gradients
(--fusion_mb), not in one for all: a bucket need not wait for gradients of other buckets. Infinity and NaN count as
nothing there, go over the wire as what they are and make the sum infinite or NaN, which a loss scale must see.
"""
import tensorflow as tf

LARGEST_SUM = 15  # as a power of two


def scales(gradients, workers: int, maximum) -> tf.Tensor:
    """The power of two for each gradient, float32 (gradients,), the same on all workers.

    maximum: a function of a float32 vector that gives the largest over all workers, element by element.
    """
    magnitudes = [tf.reduce_max(tf.where(tf.math.is_finite(g), tf.abs(g), 0)) for g in gradients]
    magnitudes = maximum(tf.stack([tf.cast(one, tf.float32) for one in magnitudes]))
    # Of 1.xxx * 2**e, e, from the number's bits: a logarithm could differ in the last digit between machines.
    exponents = tf.bitwise.right_shift(tf.bitcast(magnitudes, tf.int32), 23) - 127
    return power_of_two(LARGEST_SUM - 1 - exponents - (workers - 1).bit_length())


def power_of_two(exponents) -> tf.Tensor:
    """2.0 ** exponents, exactly, which are brought to between -126 and 100: its inverse has to be a float32, too."""
    exponents = tf.clip_by_value(exponents, -126, 100)
    return tf.bitcast(tf.bitwise.left_shift(exponents + 127, 23), tf.float32)
