"""Gradients whose factor is applied where they are used, so that an update does not multiply each of them first."""
from typing import Any, NamedTuple

import tensorflow as tf


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
