"""Stacks tensors of the same shape, so that an update launches hundreds of operations and not thousands.

A GPU takes about as long to launch an operation as to do a small one, and ResNet-50 has 161 variables of 33 shapes.
"""
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

STACKED = 2**18  # elements: a larger tensor is not stacked, since that copies it
ONE_THREAD = 2**16  # elements: TensorFlow sums so few on one thread, whatever their number (up to 2**17, measured)
ROWS = 256  # of a tensor that is not stacked; one thread sums each row


@dataclass(frozen=True)
class Stack:
    """Tensors handled as one, by their positions in a list. alone: a single large one, left as it is."""

    positions: tuple[int, ...]
    alone: bool

    def of(self, tensors: Sequence) -> tf.Tensor:
        """One tensor (positions, *shape), or of shape where it is alone."""
        chosen = [tensors[position] for position in self.positions]
        return chosen[0] if self.alone else tf.stack(chosen)

    def parts(self, stacked: tf.Tensor) -> list[tf.Tensor]:
        return [stacked] if self.alone else tf.unstack(stacked, len(self.positions))


def stacks_of(tensors: Sequence) -> list[Stack]:
    """Every position in one stack, those that stand alone last. tensors: all with a static shape."""
    groups = {}
    for position, one in enumerate(tensors):
        large = one.shape.num_elements() > STACKED
        groups.setdefault((tuple(one.shape), one.dtype, position if large else None), []).append(position)
    made = [Stack(tuple(group), len(group) == 1 and tensors[group[0]].shape.num_elements() > ONE_THREAD)
            for group in groups.values()]
    return sorted(made, key=lambda stack: stack.alone)


def norms(stacks: Sequence[Stack], stacked: Sequence[tf.Tensor], jit_compile: bool = False) -> tf.Tensor:
    """The L2 norm of each tensor in the stacks' order, float32 (tensors,).

    The same bits whatever the number of threads, of which workers may have different ones: no row is summed by two.
    jit_compile: in operations that XLA can compile, which pass twice over memory on a CPU.
    """
    norm = _plain_norm if jit_compile else tf.math.reduce_euclidean_norm
    found, rows = [], []
    for stack, tensor in zip(stacks, stacked, strict=True):
        if stack.alone:
            rows.append(norm(_rows(tensor), axis=1))
        else:
            found.append(norm(tensor, axis=list(range(1, tensor.shape.rank))))
    if rows:
        found.append(norm(tf.stack(rows), axis=1))
    return tf.concat([tf.cast(one, tf.float32) for one in found], axis=0)


def norms_of(tensors: Sequence) -> tf.Tensor:
    """The L2 norm of each tensor, variable or IndexedSlices, float32 (tensors,)."""
    return _in_order(tensors, norms)


def largest_of(tensors: Sequence) -> tf.Tensor:
    """The largest magnitude of each tensor's finite elements, or 0, float32 (tensors,)."""
    def largest(stacks, stacked):
        finite = [tf.where(tf.math.is_finite(one), tf.abs(one), tf.zeros([], one.dtype)) for one in stacked]
        found = [tf.reduce_max(one, axis=None if stack.alone else list(range(1, one.shape.rank)))
                 for stack, one in zip(stacks, finite, strict=True)]
        return tf.concat([tf.cast(tf.reshape(one, [-1]), tf.float32) for one in found], axis=0)

    return _in_order(tensors, largest)


def _in_order(tensors, function):
    """What a function of stacks and of stacked tensors gives for each tensor, in the tensors' order."""
    tensors = [tf.convert_to_tensor(one) for one in tensors]
    stacks = stacks_of(tensors)
    order = [position for stack in stacks for position in stack.positions]
    return tf.gather(function(stacks, [stack.of(tensors) for stack in stacks]), np.argsort(order))


def _plain_norm(tensor, axis):
    return tf.sqrt(tf.reduce_sum(tf.square(tensor), axis))


def _rows(tensor):
    if rest := -tensor.shape.num_elements() % ROWS:
        tensor = tf.pad(tf.reshape(tensor, [-1]), [[0, rest]])
    return tf.reshape(tensor, [ROWS, -1])
