"""What keeps updates cheap: tensors of the same size are stacked, and factors are applied where gradients are used.

Launching an operation on a GPU takes about as long as running a small one. ResNet-50 has 161 variables of 22 sizes, so
stacks launch hundreds of operations instead of thousands. No update multiplies all gradients first.
"""
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

STACKED = 2**18  # elements; larger tensors are not stacked, because stacking copies them
ONE_THREAD = 2**16  # elements that TensorFlow sums on one thread, whatever the number of threads (measured: 2**17)
OUTSIDE_XLA = "XLA_needs_LARS_with_jit_compile_True"  # a name that XLA's error about the operation shows
ROWS = 256  # rows into which a tensor that is not stacked is split; one thread sums each row


class Scaled(NamedTuple):
    """A gradient: factor * tensor.

    factor: number or float32 scalar, such as 1 / workers for a sum over workers. norm: L2 norm of the gradient, float32
    scalar, or None if nobody has computed it.
    """

    tensor: Any
    factor: Any = 1.0
    norm: Any = None

    @classmethod
    def of(cls, gradient) -> "Scaled":
        """Returns a gradient, which may be Scaled, a tensor or IndexedSlices, as Scaled with a dense tensor."""
        scaled = gradient if isinstance(gradient, cls) else cls(gradient)
        return scaled._replace(tensor=tf.convert_to_tensor(scaled.tensor))

    @property
    def value(self):
        """The gradient as a tensor, or as IndexedSlices."""
        return tf.math.scalar_mul(self.factor, self.tensor)


@dataclass(frozen=True)
class Stack:
    """Tensors to process as one. positions: their indices in a list. shapes: of each. is_single: one large tensor, not
    stacked.
    """

    positions: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_single: bool


def stacks_of(tensors: Sequence) -> list[Stack]:
    """Assigns each index to one stack, with single large tensors last. tensors: all with a static shape."""
    groups = {}
    for position, tensor in enumerate(tensors):
        size = tensor.shape.num_elements()
        groups.setdefault((size, tensor.dtype, position if size > STACKED else None), []).append(position)
    made = [Stack(tuple(group), tuple(tuple(tensors[position].shape) for position in group),
                  len(group) == 1 and tensors[group[0]].shape.num_elements() > ONE_THREAD)
            for group in groups.values()]
    return sorted(made, key=lambda stack: stack.is_single)


def stacked(stacks: Sequence[Stack], tensors: Sequence) -> list[tf.Tensor]:
    """Returns one tensor per stack, of shape (positions, elements), or of the tensor's own shape if it is single."""
    chosen = [[tensors[position] for position in stack.positions] for stack in stacks]
    return [tf.convert_to_tensor(group[0]) if stack.is_single else tf.stack([tf.reshape(t, [-1]) for t in group])
            for stack, group in zip(stacks, chosen, strict=True)]


def unstacked(stacks: Sequence[Stack], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns what `stacked` has stacked, in the order before."""
    parts = [[tensor] if stack.is_single else map(tf.reshape, tf.unstack(tensor, len(stack.positions)), stack.shapes)
             for stack, tensor in zip(stacks, tensors, strict=True)]
    return in_order(stacks, [part for group in parts for part in group])


def stack_order(stacks: Sequence[Stack]) -> list[int]:
    """Returns the indices in a list of all tensors, stack after stack."""
    return [position for stack in stacks for position in stack.positions]


def spread(stacks: Sequence[Stack], tensors: Sequence[tf.Tensor], values: tf.Tensor) -> list[tf.Tensor]:
    """Returns a value of each tensor in shapes that multiply what `stacked` has returned.

    values: in the order of the stacks, float32 (tensors,).
    """
    parts = tf.split(values, [len(stack.positions) for stack in stacks])
    return [tf.cast(tf.reshape(part, [] if stack.is_single else [-1, 1]), tensor.dtype)
            for stack, tensor, part in zip(stacks, tensors, parts, strict=True)]


def in_order(stacks: Sequence[Stack], values: Sequence) -> list:
    """Returns values that are in the order of the stacks in the order before."""
    return [value for _, value in sorted(zip(stack_order(stacks), values, strict=True), key=lambda pair: pair[0])]


def norms(stacks: Sequence[Stack], tensors: Sequence[tf.Tensor], jit_compile: bool = False) -> tf.Tensor:
    """Returns the L2 norm of each tensor in the order of the stacks, float32 (tensors,).

    The result is bit-identical for any number of threads, which may differ between workers, because one thread sums
    each row. jit_compile: use operations that XLA can compile. They read memory twice on a CPU.
    """
    norm = _plain_norm if jit_compile else functools.partial(tf.math.reduce_euclidean_norm, name=OUTSIDE_XLA)
    of_stacks = [norm(tensor, axis=1) for stack, tensor in zip(stacks, tensors, strict=True) if not stack.is_single]
    rows = [norm(_rows(tensor), axis=1) for stack, tensor in zip(stacks, tensors, strict=True) if stack.is_single]
    if rows:
        of_stacks.append(norm(tf.stack(rows), axis=1))
    return tf.concat([tf.cast(values, tf.float32) for values in of_stacks], axis=0)


def norms_of(tensors: Sequence) -> tf.Tensor:
    """Returns the L2 norm of each tensor, variable or IndexedSlices, float32 (tensors,)."""
    return _per_tensor(tensors, norms)


def largest_of(tensors: Sequence) -> tf.Tensor:
    """Returns the largest magnitude of each tensor's finite elements, or 0 if it has none, float32 (tensors,)."""
    def largest(stacks, tensors):
        finite = [tf.where(tf.math.is_finite(tensor), tf.abs(tensor), tf.zeros([], tensor.dtype)) for tensor in tensors]
        maxima = [tf.reduce_max(tensor, axis=None if stack.is_single else 1)
                  for stack, tensor in zip(stacks, finite, strict=True)]
        return tf.concat([tf.cast(tf.reshape(values, [-1]), tf.float32) for values in maxima], axis=0)

    return _per_tensor(tensors, largest)


def _per_tensor(tensors, function):
    """Applies a function of stacks and stacked tensors; returns its results in the order of the tensors."""
    tensors = [*map(tf.convert_to_tensor, tensors)]
    stacks = stacks_of(tensors)
    return tf.gather(function(stacks, stacked(stacks, tensors)), np.argsort(stack_order(stacks)))


def _plain_norm(tensor, axis):
    return tf.sqrt(tf.reduce_sum(tf.square(tensor), axis))


def _rows(tensor):
    if rest := -tensor.shape.num_elements() % ROWS:
        tensor = tf.pad(tf.reshape(tensor, [-1]), [[0, rest]])
    return tf.reshape(tensor, [ROWS, -1])
