"""train.py with one more model, bn_convnet: the smallest with batch norm, where the network itself does not matter.

TensorFlow compiles its step many times faster than a ResNet-20 with its 19 norms.
"""
import runpy
import sys
from pathlib import Path

from model_zoo import MODELS, ModelInfo

PROGRAM = Path(__file__)
NAME = "bn_convnet"
INFO = ModelInfo("tests.rigs.bn_train", NAME, 16)


def bn_convnet(x, classes, batch_norm_momentum, seed):
    """Three convolutions of 16, 32 and 64 channels, each with batch norm; the last two have stride 2. Some dropout."""
    import tensorflow as tf

    from model_zoo.layers import BatchNormalization, Dropout, seeds

    numbers = seeds(seed)
    for channels, stride in ((16, 1), (32, 2), (64, 2)):
        start = tf.keras.initializers.HeNormal(next(numbers))
        x = tf.keras.layers.Conv2D(channels, 3, stride, "same", use_bias=False, kernel_initializer=start)(x)
        x = tf.keras.layers.ReLU()(BatchNormalization(momentum=batch_norm_momentum)(x))
    start = tf.keras.initializers.RandomNormal(0, 0.01, next(numbers))
    pooled = Dropout(0.05, seed)(tf.keras.layers.GlobalAveragePooling2D()(x))
    return tf.keras.layers.Dense(classes, kernel_initializer=start, dtype="float32")(pooled)


if __name__ == "__main__":
    MODELS[NAME] = INFO
    sys.argv[0] = str(PROGRAM.parents[2] / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
