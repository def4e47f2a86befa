"""Networks of people's own, as they write them in Keras: for 3 classes, of images of 16 pixels."""
import sys

import numpy as np
import tensorflow as tf

layers = tf.keras.layers


class Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.parts = [layers.Conv2D(5, 3, 2), layers.BatchNormalization()]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return tf.nn.relu(x)


class Subclassed(tf.keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.block, self.pool, self.dense = Block(), layers.GlobalAveragePooling2D(), layers.Dense(classes)

    def call(self, x):
        return self.dense(self.pool(self.block(x)))


class Momentum(layers.Layer):
    """Keeps an average of its own."""

    def build(self, shape):
        self.mean = self.add_weight("mean", shape[-1:], trainable=False)

    def call(self, x, training=None):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, [0, 1, 2]))
        return x - self.mean


def base():
    """The first batch norm gets a product of the pixels and a matrix."""
    images = tf.keras.Input((16, 16, 3))
    x = layers.BatchNormalization(name="first")(layers.Conv2D(4, 1)(images))
    inner = tf.keras.Sequential([layers.Conv2D(6, 3, 2), layers.BatchNormalization(name="second"), layers.ReLU()])
    return tf.keras.Model(images, inner(x))


def head(x, classes, *more):
    x = layers.BatchNormalization(name="third")(layers.GlobalAveragePooling2D()(x))
    for layer in (layers.Dense(classes), *more):
        x = layer(x)
    return x


def nested(x, classes, **_):
    return head(base()(x), classes)


def custom(x, classes, **_):
    return head(Block()(x), classes)


def subclassed(x, classes, **_):
    return Subclassed(classes)


def frozen(x, classes, **_):
    own = base()
    own.trainable = False
    return head(own(x), classes)


def inference(x, classes, **_):
    return head(base()(x, training=False), classes)


def masks(x, classes, **_):
    dropouts = tf.keras.Sequential([layers.Dropout(0.5), layers.Conv2D(8, 3), layers.SpatialDropout2D(0.5)])
    return layers.Dense(classes)(layers.Flatten()(dropouts(x)))


def noise(x, classes, **_):
    return head(layers.GaussianNoise(0.1)(x), classes)


def plain_model(x, classes, **_):
    return tf.keras.Sequential([layers.Flatten(), layers.Dense(classes), layers.Lambda(lambda y: 2 * y)])


def rescaling(x, classes, **_):
    return tf.keras.Sequential([layers.RandomFlip(), layers.Rescaling(1 / 255), base(), layers.Flatten(),
                                layers.Dense(classes)])


def preprocessing(x, classes, **_):
    images = tf.keras.Input((16, 16, 3))
    return tf.keras.Model(images, head(base()(tf.keras.applications.resnet50.preprocess_input(images)), classes))


def scaled_twice(x, classes, **_):
    return head(base()(layers.Rescaling(1 / 255)(x)), classes)


def log_softmax(x, classes, **_):
    return tf.nn.log_softmax(head(x, classes))


def softmax(x, classes, **_):
    return head(x, classes, layers.Softmax(), layers.Reshape([classes]))


def softmax_inside(x, classes, **_):
    return tf.keras.Sequential([tf.keras.Sequential([layers.Flatten(), layers.Dense(classes, "softmax")])])


def softmax_of_ones_own(x, classes, **_):
    return head(x, classes, layers.Lambda(lambda y: tf.exp(y) / tf.reduce_sum(tf.exp(y), 1, keepdims=True)))


def sigmoid(x, classes, **_):
    return tf.cast(head(x, classes, layers.Activation("sigmoid")), tf.float32)


def thousand(x, classes, **_):
    return head(x, 1000)


def maps(x, classes, **_):
    return layers.Dense(classes)(x)


def nothing(x, classes, **_):
    head(x, classes)


def two(x, classes, **_):
    return head(x, classes), x


def numbers(x, classes, **_):
    return np.zeros(classes)


def leaves(x, classes, **_):
    sys.exit("no data")


def other_arguments(x, labels):
    return head(x, labels)


def other_size(x, classes, **_):
    images = tf.keras.Input((32, 32, 3))
    return tf.keras.Model(images, head(images, classes))


def shared(x, classes, **_):
    own = base()
    return head(own(x) + own(x[:, ::-1]), classes)


def channels_first(x, classes, **_):
    return head(layers.BatchNormalization(axis=1, name="rows")(x), classes)


def synchronized(x, classes, **_):
    return head(layers.BatchNormalization(synchronized=True, name="global")(x), classes)


def in_a_lambda(x, classes, **_):
    norm = layers.BatchNormalization()
    norm.build((None, 16, 16, 3))
    return head(layers.Lambda(lambda y: norm(y), name="hidden")(x), classes)


def own_average(x, classes, **_):
    return head(Momentum(name="average")(x), classes)
