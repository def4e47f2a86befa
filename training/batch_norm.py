"""Batch norm's statistics measured anew: "Batch Normalization without Moving Average" (arXiv:1711.04325, section 3).

1811.05233 uses it (section 3.2): mean and mean of squares are averaged over the workers in float32, whatever the
precision of the model.
"""
import tensorflow as tf

from distributed.world import World
from training.bad_input import bad_input_is_user_error

SAMPLES = 2048  # at least so many training samples, over all workers, are measured; or the whole set, if smaller


class ExactStatistics:
    """Sets a model's moving mean and variance to what its training batches have under the present weights."""

    def __init__(self, model, world: World):
        self._world = world
        self._counters = [v for v in model.non_trainable_variables if v.dtype.is_integer]  # dropout's calls
        self._layers = [layer for layer in model.layers if isinstance(layer, tf.keras.layers.BatchNormalization)]
        if self._layers:
            self._inputs = tf.keras.Model(model.inputs, [layer.input for layer in self._layers])

    def measure(self, feed, position: int, batch_size: int, micro_batch_size: int) -> None:
        """Reads training batches from a position of the stream on, the same whatever has been read before.

        Training goes on as if this had not been: dropout counts no call. Raises UserError for data that cannot be read.
        """
        if not self._layers:
            return
        steps = -(-min(SAMPLES, feed.dataset.train.samples) // batch_size)
        count = steps * batch_size // (feed.shards * micro_batch_size)
        sums = [tf.zeros([2, layer.moving_mean.shape[0]]) for layer in self._layers]
        counted = [counter.read_value() for counter in self._counters]
        with feed.train(position, steps, batch_size, micro_batch_size) as batches:
            for number in range(count):
                with bad_input_is_user_error("measuring batch norm's statistics stopped", batches,
                                             number * micro_batch_size):
                    moments = self._moments(batches.iterator)
                sums = [a + b for a, b in zip(sums, moments, strict=True)]
        for counter, before in zip(self._counters, counted, strict=True):
            counter.assign(before)
        means = self._world.mean([total / count for total in sums], "batch_norm_statistics")
        for layer, (mean, squares) in zip(self._layers, means, strict=True):
            layer.moving_mean.assign(mean)
            layer.moving_variance.assign(tf.maximum(squares - tf.square(mean), 0))

    @tf.function(autograph=False)
    def _moments(self, batches):
        """Mean and mean of squares, float32 (2, channels), of each layer's input in the next micro-batch."""
        images, _ = next(batches)
        inputs = tf.nest.flatten(self._inputs(images, training=True))
        inputs = [tf.cast(x, tf.float32) for x in inputs]
        return [tf.stack([tf.reduce_mean(f, axis=list(range(len(x.shape) - 1))) for f in (x, tf.square(x))])
                for x in inputs]
