"""A small convolutional network without batch normalisation, on which large batches show their difficulty."""
import tensorflow as tf

layers = tf.keras.layers


def convnet(classes, image_size, batch_norm_momentum, seed):
    """Three 3x3 convolutions of 32, 64 and 128 channels, each with max pooling, and dense layers of 256 and `classes`.

    He initialisation. batch_norm_momentum is not read: there is none.
    """
    del batch_norm_momentum
    seeds = iter(range(seed * 1000, seed * 1000 + 1000))

    def initializer():
        return tf.keras.initializers.HeNormal(next(seeds))

    inputs = x = tf.keras.Input((image_size, image_size, 3))
    for channels in (32, 64, 128):
        x = layers.Conv2D(channels, 3, padding="same", activation="relu", kernel_initializer=initializer())(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(256, activation="relu", kernel_initializer=initializer())(layers.Flatten()(x))
    logits = layers.Dense(classes, kernel_initializer=initializer(), dtype="float32")(x)
    return tf.keras.Model(inputs, logits, name="convnet")
