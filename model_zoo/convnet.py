"""A small convolutional network without batch normalisation, on which large batches show their difficulty."""
import tensorflow as tf

from model_zoo.layers import seeds

layers = tf.keras.layers


def convnet(x, classes, batch_norm_momentum, seed, stream):
    """Three 3x3 convolutions of 16, 32 and 64 channels, each with max pooling, and dense layers of 128 and `classes`.

    He initialisation; biases start as AlexNet's (alexnet.py), not at zero: where a bias is zero LARS's trust ratio is
    1, and its first step would be of the whole learning rate. There is no norm and no dropout: batch_norm_momentum and
    stream are not read.
    """
    del batch_norm_momentum, stream
    numbers = seeds(seed)

    def options(bias):
        return {"kernel_initializer": tf.keras.initializers.HeNormal(next(numbers)),
                "bias_initializer": tf.keras.initializers.Constant(bias)}

    for channels in (16, 32, 64):
        x = layers.Conv2D(channels, 3, padding="same", activation="relu", **options(0.01))(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(128, activation="relu", **options(0.1))(layers.Flatten()(x))
    return layers.Dense(classes, dtype="float32", **options(0.01))(x)
