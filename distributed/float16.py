"""Scales gradients so that they fit float16 while they are summed over the workers.

Horovod sums in the dtype that it sends. In float16, a gradient above 65,504 overflows, a sum of smaller ones may
overflow, too, and a gradient below 6e-8 becomes 0. Each gradient is therefore multiplied before the sum by a power of
two, and divided by it after the sum, in float32. Powers of two change no digit.

The power is that of the update before, so that a bucket can be sent as soon as the backward pass has computed it. Each
update sums the largest magnitudes on the workers, in a message of a few bytes that nothing waits for. The next power
brings this sum, which no sum over some of the workers exceeds, to between 2**11 and 2**12. So gradients may grow 16
times from one update to the next. If a sum is infinite or NaN nevertheless, all workers see it, and they exchange the
same gradients again, in float32: no update is lost, and a loss scale sees only what is really infinite. This is also
how the first update, which has no power yet, exchanges them.
"""
import tensorflow as tf

UNKNOWN = float("inf")  # scale before the first update, with which every sum overflows
LARGEST_SUM = 12  # exponent of two
SMALLEST, LARGEST = 2.0 ** -126, 2.0 ** 100  # limits of the scales, whose inverses have to be float32, too
EXPONENT = 0x7F800000  # mask that turns the bits of a positive float32 1.xxx * 2**e into those of 2**e


def initial_scales(gradients: int) -> tf.Variable:
    """Returns the scales before the first update, float32 (gradients,). Their name is that in checkpoints."""
    return tf.Variable(tf.fill([gradients], UNKNOWN), trainable=False, name="wire_scales")


def scales(magnitudes: tf.Tensor) -> tf.Tensor:
    """Returns the power of two for each gradient, float32 (gradients,).

    magnitudes: sums over the workers of the largest magnitudes, float32 (gradients,), the same on all workers.
    """
    # A bit mask, because a logarithm could differ in the last digit between machines. No integer arithmetic, because
    # TensorFlow adds int32 on the host, wherever the tensors are.
    powers = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(magnitudes, tf.int32), EXPONENT), tf.float32)
    return tf.clip_by_value(2.0 ** (LARGEST_SUM - 1) / powers, SMALLEST, LARGEST)
