"""Sums whose bits do not depend on the order of the terms (--deterministic).

Rounding makes a sum of floating-point numbers depend on its order. Integers have no rounding, so micro-batches and
workers may add them in any order, by any all-reduce. A term x is several words, integers of 64 bits, each of which
represents what the ones before it leave:

    rest_0 = x    word_k = round(rest_k / unit_k)    rest_k+1 = rest_k - word_k unit_k
    unit_k = 2**(e - b - k (b + 1))

With at most t terms, b = 62 - ceil(log2(t)) bits of each are used, so that no sum wraps. Magnitudes below 2**e fit. A
term that does not fit, or is not finite, is counted in one more integer, which makes the sum NaN.

Gradients have two words, and e = 32: the second resolves 2**-(2 b - 31), which is 7e-27 for 8 terms and 2e-21 for
4,096. All else, such as the statistics of batch norm, has few values, and as many words as normal float32 numbers need.
"""
import math
from dataclasses import dataclass

import tensorflow as tf

EXPONENT, WORDS = 32, 2  # of gradients
FLOAT32_EXPONENT, FLOAT32_LEAST = 128, -149  # powers of two: the first that float32 lacks, and its smallest digit


@dataclass(frozen=True)
class Float32:
    """Sums of float32 tensors as they are, whose bits depend on the order."""

    bytes_per_value = 4

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

    def zeros(self, shapes, groups) -> list[tf.Tensor]:
        """Returns the sums of no terms of these shapes; see `terms`."""
        del groups
        return [self.zero(shape) for shape in shapes]

    def terms(self, tensors, groups) -> list[tf.Tensor]:
        """Returns what represents tensors in sums. groups: lists of their indices, for a form that joins tensors."""
        del groups
        return [*tensors]

    def totals(self, sums, shapes, groups) -> list[tf.Tensor]:
        """Returns sums of `terms` as float32 tensors of their shapes."""
        del shapes, groups
        return [*sums]


FLOAT32 = Float32()


@dataclass(frozen=True)
class FixedPoint:
    """Sums of float32 tensors in fixed point. A term or a sum of n values is a vector, int64 (words n + 1,).

    most: terms that a sum has at most. It determines the result, too. exponent: e. words: integers per value.

    All tensors of a group share one vector: with a vector for each of ResNet-50's 161 gradients, TensorFlow takes more
    than twice as long to prepare a step. A value that does not fit makes all of its group NaN.
    """

    most: int
    exponent: int = EXPONENT
    words: int = WORDS

    @classmethod
    def lossless(cls, terms: int) -> "FixedPoint":
        """Returns the form in which all normal float32 numbers fit, and only the sum is rounded, to float32.

        TensorFlow on a CPU takes what is smaller, in terms and in the sum, for 0: magnitudes below 2**-126.
        """
        bits = cls(terms)._bits
        return cls(terms, FLOAT32_EXPONENT, math.ceil((FLOAT32_EXPONENT - FLOAT32_LEAST + 1) / (bits + 1)))

    @property
    def bytes_per_value(self) -> int:
        return 8 * self.words

    @property
    def _bits(self) -> int:
        return 62 - math.ceil(math.log2(self.most))

    @property
    def _units(self) -> list[float]:
        return [2.0**(self.exponent - self._bits - word * (self._bits + 1)) for word in range(self.words)]

    def zero(self, shape) -> tf.Tensor:
        return tf.zeros([self.words * tf.TensorShape(shape).num_elements() + 1], tf.int64)

    def term(self, tensor: tf.Tensor) -> tf.Tensor:
        """IndexedSlices become dense. Each step but the last rounding is exact: powers of two change no digit."""
        rest = tf.reshape(tf.convert_to_tensor(tensor), [-1])
        if self.exponent > EXPONENT:  # float32 has no power of two beyond all of its numbers
            rest = tf.cast(rest, tf.float64)
        fits = tf.abs(rest) < 2.0**self.exponent  # false for NaN
        rest = tf.where(fits, rest, tf.zeros_like(rest))
        words = []
        for unit in self._units:
            word = tf.round(rest * (1 / unit))
            rest -= word * unit
            words.append(tf.cast(word, tf.int64))
        misfits = rest.shape[0] - tf.math.count_nonzero(fits, keepdims=True)
        return tf.concat([*words, misfits], axis=0)

    def total(self, summed: tf.Tensor, shape) -> tf.Tensor:
        words = tf.split(tf.cast(summed[:-1], tf.float64), self.words)
        value = tf.zeros_like(words[0])
        for word, unit in reversed([*zip(words, self._units, strict=True)]):
            value += word * unit
        value = tf.where(summed[-1] > 0, tf.constant(math.nan, tf.float64), value)
        return tf.reshape(tf.cast(value, tf.float32), shape)

    def zeros(self, shapes, groups) -> list[tf.Tensor]:
        return [self.zero([sum(_sizes(shapes, group))]) for group in groups]

    def terms(self, tensors, groups) -> list[tf.Tensor]:
        return [self.term(tf.concat([tf.reshape(tf.convert_to_tensor(tensors[number]), [-1]) for number in group], 0))
                for group in groups]

    def totals(self, sums, shapes, groups) -> list[tf.Tensor]:
        found = {}
        for summed, group in zip(sums, groups, strict=True):
            sizes = _sizes(shapes, group)
            parts = tf.split(self.total(summed, [sum(sizes)]), sizes)
            found |= {number: tf.reshape(part, shapes[number]) for number, part in zip(group, parts, strict=True)}
        return [found[number] for number in range(len(shapes))]


def _sizes(shapes, group) -> list[int]:
    """Returns the number of values of each tensor of a group."""
    return [tf.TensorShape(shapes[number]).num_elements() for number in group]
