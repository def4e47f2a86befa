"""A small convolutional network without batch normalisation, which shows how hard large batches are to train."""
import tensorflow as tf

from model_zoo.layers import seeds

layers = tf.keras.layers


def convnet(x, classes, batch_norm_momentum, seed):
    """Three 3x3 convolutions of 16, 32 and 64 channels, each with max pooling, and dense layers of 128 and `classes`.

    Weights use He initialisation. Biases start as in AlexNet (alexnet.py), not at zero: LARS's trust ratio of a zero
    bias is 1, so its first step would use the full learning rate. There is no batch norm, so
    batch_norm_momentum is ignored.
    """
    del batch_norm_momentum
    numbers = seeds(seed)

    def options(bias):
        return {"kernel_initializer": tf.keras.initializers.HeNormal(next(numbers)),
                "bias_initializer": tf.keras.initializers.Constant(bias)}

    for channels in (16, 32, 64):
        x = layers.Conv2D(channels, 3, padding="same", activation="relu", **options(0.01))(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(128, activation="relu", **options(0.1))(layers.Flatten()(x))
    return layers.Dense(classes, dtype="float32", **options(0.01))(x)
