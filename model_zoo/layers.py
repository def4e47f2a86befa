"""What the models share: initial values that follow from a seed, dropout that follows from a seed and a step."""
import tensorflow as tf


def seeds(seed: int):
    """An endless row of seeds, one for each layer that draws initial values."""
    return iter(range(seed * 10_000, (seed + 1) * 10_000))


class Dropout(tf.keras.layers.Layer):
    """Dropout whose mask is a function of its seed, the worker's stream and the number of training calls so far.

    The number is a weight, so that a checkpoint holds it and a resumed run goes on with the same masks. Keras's own
    draws from a generator that no checkpoint holds.
    """

    def __init__(self, rate: float, seed: int, stream: int = 0, **kwargs):
        super().__init__(**kwargs)
        self._rate, self._seed, self._stream = rate, seed, stream

    def build(self, input_shape):
        self._calls = self.add_weight("calls", (), tf.int64, "zeros", trainable=False)

    def call(self, inputs, training=False):
        if not training:
            return inputs
        seed = tf.stack([tf.constant(self._seed, tf.int64), self._calls * 1_000_003 + self._stream])
        self._calls.assign_add(1)
        kept = tf.random.stateless_uniform(tf.shape(inputs), seed) >= self._rate
        return tf.where(kept, inputs / (1 - self._rate), tf.zeros_like(inputs))


class LocalResponseNormalization(tf.keras.layers.Layer):
    """Across 5 channels, as in AlexNet: x / (1 + alpha / 5 * sum of squares) ** beta. In float32: no other kernel."""

    def call(self, inputs):
        normalised = tf.nn.local_response_normalization(
            tf.cast(inputs, tf.float32), depth_radius=2, bias=1.0, alpha=1e-4 / 5, beta=0.75)
        return tf.cast(normalised, inputs.dtype)
