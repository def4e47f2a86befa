"""Layers that the models share. Initial weights are functions of a seed; dropout masks also of a position."""
import contextlib
from collections.abc import Iterator

import tensorflow as tf

from common.errors import UserError

PHILOX = 1  # TensorFlow's number for the Philox generator, which runs on every device
PER_COUNT = 4  # random numbers for each value of its counter
WHOLE_SAMPLES = (None, 1, 1, 1)  # noise shape of stochastic depth


def seeds(seed: int):
    """Returns an iterator over seeds, one for each layer with random numbers. Models with other seeds share none."""
    return iter(range(seed * 10_000, (seed + 1) * 10_000))


def layers_of(model) -> list:
    """Returns the layers of a model at any depth, in the order of its variables, without the models that hold them."""
    return [layer for layer in model._flatten_layers(include_self=False) if not isinstance(layer, tf.keras.Model)]


def norms(model) -> list:
    """Returns the layers whose statistics each call of the model in training observes, in the order of `layers_of`."""
    return [layer for layer in layers_of(model) if isinstance(layer, BatchNormalization) and layer.observes]


def last_layer(model):
    """Returns the layer that makes the logits: the last one with weights. Layers without weights may follow it."""
    return next(layer for layer in reversed(layers_of(model)) if layer.weights)


def trained_variables(model, freeze: bool) -> list[tf.Variable]:
    """Returns the variables to train: all trainable ones of a model, or with --freeze those of its last layer.

    Raises UserError if that layer has none.
    """
    layer = last_layer(model) if freeze else model
    if freeze and not layer.trainable_variables:
        raise UserError(f"--freeze: the last layer with weights, {layer.name}, has none that can be trained")
    return layer.trainable_variables


def dropout_of(layer) -> tuple | None:
    """Returns rate and noise shape of Keras's dropout or stochastic depth; None for other layers."""
    kind, layers = type(layer), tf.keras.layers
    if kind.__name__ == "StochasticDepth" and kind.__module__.startswith("keras."):  # of ConvNeXt
        return layer.drop_path_rate, WHOLE_SAMPLES
    dimensions = {layers.SpatialDropout1D: 1, layers.SpatialDropout2D: 2, layers.SpatialDropout3D: 3}.get(kind)
    if dimensions:  # whole channels
        return layer.rate, (None, *[1] * dimensions, None)
    return (layer.rate, layer.noise_shape) if kind is layers.Dropout else None


def make_own(model, batch_norm_momentum: float, seed: int) -> None:
    """Turns Keras's batch norm and dropout, at any depth of a built model, into the layers of this module.

    Only the class of a layer changes, so the variables and their order stay. Raises UserError for a layer with moving
    statistics that cannot be turned into BatchNormalization.
    """
    mask_seeds = reversed([*seeds(seed)])  # as in ResNet: the weights may have the others
    for layer in layers_of(model):
        if dropout := dropout_of(layer):
            (layer._rate, layer._noise_shape), layer._seed = dropout, next(mask_seeds)
            layer.__class__ = Dropout
        elif hasattr(layer, "moving_mean") and not isinstance(layer, BatchNormalization):
            if (type(layer) is not tf.keras.layers.BatchNormalization or layer.axis != [layer.input_spec.ndim - 1]
                    or layer.synchronized or layer.renorm or layer.virtual_batch_size):
                raise UserError(f"layer {layer.name} has a batch norm that cannot be replaced; use "
                                "tf.keras.layers.BatchNormalization() over the last axis: --batch_norm_span says over "
                                "how many samples, also of several workers")
            layer.__class__, layer.momentum = BatchNormalization, batch_norm_momentum


class Dropout(tf.keras.layers.Layer):
    """Dropout that gives each training sample a mask that is a function of the seed and its position in the stream.

    Any number of workers and any micro-batch size therefore have the same masks, and so has a resumed run. Keras's own
    dropout uses a generator that no checkpoint holds, and so does this one outside `masks_at`.

    noise_shape: as in Keras: the shape of a mask, in which None stands for the input's dimension. (None, 1, 1, 1) keeps
    or drops whole samples (stochastic depth). Default: the input's shape.
    """

    position = None  # of the first sample of the call in the stream, set by `masks_at`

    def __init__(self, rate: float, seed: int, noise_shape=None, **kwargs):
        super().__init__(**kwargs)
        self._rate = rate
        self._seed = seed
        self._noise_shape = noise_shape

    def call(self, inputs, training=False):
        if not training:
            return inputs
        shape = inputs.shape[1:]
        if self._noise_shape:
            shape = tf.TensorShape([own or given for own, given in zip(self._noise_shape[1:], shape, strict=True)])
        mask = self._uniform(tf.shape(inputs)[0], shape) >= self._rate
        return tf.where(mask, inputs / (1 - self._rate), tf.zeros_like(inputs))

    def _uniform(self, samples, shape):
        if self.position is None:
            return tf.random.uniform([samples, *shape], seed=self._seed)
        # A GPU can run this from a key and a counter. From a seed, TensorFlow would derive them on the host.
        size = shape.num_elements()
        counts = -(-size // PER_COUNT)
        first = tf.cast(self.position * counts, tf.uint64)
        uniform = tf.raw_ops.StatelessRandomUniformV2(
            shape=[samples, PER_COUNT * counts], key=tf.constant([self._seed], tf.uint64),
            counter=tf.stack([first, tf.zeros_like(first)]), alg=PHILOX)
        return tf.reshape(uniform[:, :size], [samples, *shape])


class ResidualSum(Dropout):
    """The sum of a residual branch, which some training samples skip (stochastic depth), and its shortcut.

    It is one layer, like the plain sum, so that the order of a model's variables is the same with and without it.
    """

    def __init__(self, rate: float, seed: int, **kwargs):
        super().__init__(rate, seed, WHOLE_SAMPLES, **kwargs)

    def call(self, inputs, training=False):
        branch, shortcut = inputs
        return super().call(branch, training) + shortcut


@contextlib.contextmanager
def masks_at(model, position) -> Iterator[None]:
    """Context manager in which a call of the model is traced with the dropout masks of samples in the stream.

    position: that of the first of them, an int64 scalar.
    """
    layers = [layer for layer in layers_of(model) if isinstance(layer, Dropout)]
    for layer in layers:
        layer.position = position
    try:
        yield
    finally:
        for layer in layers:
            layer.position = None


class BatchNormalization(tf.keras.layers.BatchNormalization):
    """Batch norm over a part of the batch (ghost batch norm) or over several workers (synchronized batch norm).

    A call in training moves the moving statistics once, towards the mean over its groups. If `observe` is set, it
    instead receives that mean, and the layer leaves its moving statistics alone. A caller with several calls per update
    of the weights can thereby move them once per update. A layer that is frozen (trainable=False), or that the model
    calls with training=False, normalises with its moving statistics and observes none.

    The attributes are read when a training step is traced.
    """

    groups = 1  # number of slices of a micro-batch that are normalised one after another
    neighbours = 1  # number of workers that share the statistics
    mean_over_neighbours = None  # function that returns the mean of a float32 tensor over them, and has a gradient
    # Function of the statistics, float32 (2, channels), and of the layer's inputs. The statistics are the mean, and the
    # variance with Bessel's correction, n / (n - 1), as in the fused kernel.
    observe = None
    called_in_training = True  # whether the model passes the training argument of its own call to this layer

    @property
    def observes(self) -> bool:
        return self.trainable and self.called_in_training

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs, training=None, mask=None):
        del mask  # which images do not have; Keras's layer takes it
        if not (training and self.trainable):
            return super().call(inputs, training=False)
        if self.neighbours > 1:
            outputs, statistics = self._shared(inputs)
        else:
            parts = [self._normalised(part) for part in tf.split(inputs, self.groups)]
            outputs = tf.concat([part for part, _ in parts], axis=0) if self.groups > 1 else parts[0][0]
            statistics = tf.add_n([moments for _, moments in parts]) / self.groups
        if self.observe:
            self.observe(statistics, inputs)
        else:
            for moving, new in zip((self.moving_mean, self.moving_variance), tf.unstack(statistics), strict=True):
                moving.assign_add((1 - self.momentum) * (new - moving))
        return outputs

    def _normalised(self, inputs):
        """Normalises images with their own statistics, in the fused kernel."""
        channels = [inputs.shape[-1]]
        images = inputs if len(inputs.shape) == 4 else tf.reshape(inputs, [-1, 1, 1, *channels])
        outputs, *statistics = tf.compat.v1.nn.fused_batch_norm(
            images, self.gamma if self.scale else tf.ones(channels), self.beta if self.center else tf.zeros(channels),
            epsilon=self.epsilon, is_training=True)
        if images is not inputs:
            outputs = tf.reshape(outputs, tf.shape(inputs))
        return outputs, tf.stop_gradient(tf.stack(statistics))

    def _shared(self, inputs):
        """Normalises with the neighbours' common statistics, in float32."""
        values = tf.cast(inputs, tf.float32)
        axes = list(range(len(values.shape) - 1))
        local = tf.stack([tf.reduce_mean(values, axes), tf.reduce_mean(tf.square(values), axes)])
        mean, squares = tf.unstack(self.mean_over_neighbours(local))
        variance = tf.maximum(squares - tf.square(mean), 0.0)
        count = self.neighbours * tf.cast(tf.size(values) / values.shape[-1], tf.float32)
        normalised = tf.nn.batch_normalization(values, mean, variance, self.beta, self.gamma, self.epsilon)
        statistics = tf.stop_gradient(tf.stack([mean, variance * count / (count - 1)]))
        return tf.cast(normalised, inputs.dtype), statistics


class InputNormalization(tf.keras.layers.Layer):
    """(pixels - mean) / divisor of each channel, in float32.

    numbers: mean and divisor, float32 (2, channels). They belong to the trained weights, so checkpoints hold them. They
    are not in Keras's lists of weights, because nothing trains, averages or counts them.
    """

    def __init__(self, mean, divisor, **kwargs):
        super().__init__(dtype="float32", **kwargs)
        self._held = tf.train.Checkpoint(
            numbers=tf.Variable([mean, divisor], trainable=False, dtype=tf.float32, name=f"{self.name}/numbers"))

    @property
    def numbers(self) -> tf.Variable:
        return self._held.numbers

    @tf.autograph.experimental.do_not_convert  # after which Keras always passes `training`
    def call(self, inputs, training=None):
        del training
        mean, divisor = tf.unstack(self.numbers)
        return (tf.cast(inputs, tf.float32) - mean) / divisor


def input_numbers(model) -> list[tf.Variable]:
    """Returns `numbers` of a model's InputNormalization in a list, which is empty for a network of Keras."""
    return [layer.numbers for layer in layers_of(model) if isinstance(layer, InputNormalization)]


class LocalResponseNormalization(tf.keras.layers.Layer):
    """Normalisation across 5 channels, as in AlexNet: x / (1 + alpha / 5 * sum of squares) ** beta.

    It runs in float32, because TensorFlow's GPU kernel has no other dtype.
    """

    def call(self, inputs):
        normalised = tf.nn.local_response_normalization(
            tf.cast(inputs, tf.float32), depth_radius=2, bias=1.0, alpha=1e-4 / 5, beta=0.75)
        return tf.cast(normalised, inputs.dtype)
