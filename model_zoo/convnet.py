"""Small convolutional networks: without batch normalisation, which large batches find hard to train, and with it."""
from functools import partial

import tensorflow as tf

from model_zoo.layers import BatchNormalization, seeds

layers = tf.keras.layers


def convnet(x, classes, batch_norm_momentum, seed, batch_norm=False):
    """Three 3x3 convolutions of 16, 32 and 64 channels, each with max pooling, and dense layers of 128 and `classes`.

    Weights use He initialisation. Biases start as in AlexNet (alexnet.py), not at zero: LARS's trust ratio of a zero
    bias is 1, so its first step would use the full learning rate.

    batch_norm: whether the inputs of the second and the third convolution are normalized, after ReLU and pooling and
    without a learned scale and shift, as in AlexNet-BN (alexnet.py). Otherwise, batch_norm_momentum is ignored.
    """
    numbers = seeds(seed)

    def options(bias):
        return {"kernel_initializer": tf.keras.initializers.HeNormal(next(numbers)),
                "bias_initializer": tf.keras.initializers.Constant(bias)}

    for channels in (16, 32, 64):
        x = layers.Conv2D(channels, 3, padding="same", activation="relu", **options(0.01))(x)
        x = layers.MaxPooling2D()(x)
        if batch_norm and channels < 64:
            x = BatchNormalization(momentum=batch_norm_momentum, epsilon=1e-4, center=False, scale=False)(x)
    x = layers.Dense(128, activation="relu", **options(0.1))(layers.Flatten()(x))
    return layers.Dense(classes, dtype="float32", **options(0.01))(x)


convnet_bn = partial(convnet, batch_norm=True)
