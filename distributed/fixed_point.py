"""Sums whose bits do not depend on the order of the terms (--deterministic).

Rounding makes a sum of floating-point numbers depend on its order. Integers have no rounding, so micro-batches and
workers may add them in any order, by any all-reduce. A term x is two integers of 64 bits:

    first = round(x * 2**e)    second = round((x * 2**e - first) * 2**(b + 1))    e = b - 32

With at most t terms, b = 62 - ceil(log2(t)) bits of each are used, so that no sum wraps. Magnitudes below 2**32 fit,
and the second integer resolves 2**-(2 b - 31): 7e-27 for 8 terms, 2e-21 for 4,096. A term that does not fit, or is not
finite, is counted in a third integer, which makes the sum NaN.
"""
import math
from dataclasses import dataclass

import tensorflow as tf

LARGEST = 2.0**32  # magnitudes from here on do not fit


@dataclass(frozen=True)
class Float32:
    """Sums of float32 tensors as they are, whose bits depend on the order."""

    def zero(self, shape) -> tf.Tensor:
        """Returns the sum of no terms of this shape."""
        return tf.zeros(shape)

    def term(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what represents a tensor in a sum."""
        return tensor

    def total(self, summed: tf.Tensor, shape) -> tf.Tensor:
        """Returns a sum of terms as a float32 tensor of their shape."""
        del shape
        return summed


FLOAT32 = Float32()


@dataclass(frozen=True)
class FixedPoint:
    """Sums of float32 tensors in fixed point. A term or a sum of n values is a vector, int64 (2 n + 1,).

    terms: most terms that a sum has. It determines the result, too.
    """

    terms: int

    @property
    def _bits(self) -> int:
        return 62 - math.ceil(math.log2(self.terms))

    def zero(self, shape) -> tf.Tensor:
        return tf.zeros([2 * tf.TensorShape(shape).num_elements() + 1], tf.int64)

    def term(self, tensor: tf.Tensor) -> tf.Tensor:
        """IndexedSlices become dense. Each step but the rounding is exact: powers of two change no digit."""
        flat = tf.reshape(tf.convert_to_tensor(tensor), [-1])
        fits = tf.abs(flat) < LARGEST  # false for NaN
        scaled = tf.where(fits, flat, tf.zeros_like(flat)) * 2.0**(self._bits - 32)
        first = tf.round(scaled)
        second = tf.round((scaled - first) * 2.0**(self._bits + 1))
        misfits = flat.shape[0] - tf.math.count_nonzero(fits, keepdims=True)
        return tf.concat([tf.cast(first, tf.int64), tf.cast(second, tf.int64), misfits], axis=0)

    def total(self, summed: tf.Tensor, shape) -> tf.Tensor:
        first, second = tf.split(tf.cast(summed[:-1], tf.float64), 2)
        value = (first + second * 2.0**-(self._bits + 1)) * 2.0**(32 - self._bits)
        value = tf.where(summed[-1] > 0, tf.constant(math.nan, tf.float64), value)
        return tf.reshape(tf.cast(value, tf.float32), shape)
