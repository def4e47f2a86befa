"""AlexNet as Caffe's reference model has it, and AlexNet-BN (arXiv:1708.03888, sections 3.2.1 and 3.2.2)."""
import tensorflow as tf

from model_zoo.layers import Dropout, LocalResponseNormalization, seeds

layers = tf.keras.layers

# Output channels, kernel, stride, groups, and whether 3x3 max pooling with stride 2 follows.
CONVOLUTIONS = ((96, 11, 4, 1, True), (256, 5, 1, 2, True), (384, 3, 1, 1, False), (384, 3, 1, 2, False),
                (256, 3, 1, 2, True))
NORMALISED = 2  # local response normalisation follows the first two


def alexnet(x, classes, batch_norm_momentum, seed, stream):
    """BVLC AlexNet: groups, local response normalisation, dropout. 60,965,224 parameters for 1,000 classes at 227.

    Initial values are those whose norms table 4 of arXiv:1708.03888 prints: weights Gaussian, of deviation 0.01 and in
    dense layers 6 and 7 0.005; biases 0.01 and there 0.1.
    """
    del batch_norm_momentum
    return _alexnet(x, classes, seed, stream, norm=None)


def alexnet_bn(x, classes, batch_norm_momentum, seed, stream):
    """AlexNet with batch norm after each layer but the last, in place of local response normalisation and biases."""
    return _alexnet(x, classes, seed, stream,
                    norm=lambda: layers.BatchNormalization(momentum=batch_norm_momentum, epsilon=1e-5))


def _alexnet(x, classes, seed, stream, norm):
    numbers = seeds(seed)

    def options(deviation, bias):
        return {"kernel_initializer": tf.keras.initializers.RandomNormal(0.0, deviation, next(numbers)),
                "bias_initializer": tf.keras.initializers.Constant(bias), "use_bias": norm is None}

    for number, (channels, kernel, stride, groups, pool) in enumerate(CONVOLUTIONS):
        x = layers.Conv2D(channels, kernel, stride, "valid" if number == 0 else "same", groups=groups,
                          name=f"conv{number + 1}", **options(0.01, 0.01))(x)
        x = layers.ReLU()(norm()(x) if norm else x)
        if number < NORMALISED and not norm:
            x = LocalResponseNormalization()(x)
        if pool:
            x = layers.MaxPooling2D(3, 2)(x)
    x = layers.Flatten()(x)
    for number in (6, 7):
        x = layers.Dense(4096, name=f"fc{number}", **options(0.005, 0.1))(x)
        x = layers.ReLU()(norm()(x) if norm else x)
        x = Dropout(0.5, next(numbers), stream)(x)
    last = options(0.01, 0.01) | {"use_bias": True}
    return layers.Dense(classes, name="fc8", dtype="float32", **last)(x)
