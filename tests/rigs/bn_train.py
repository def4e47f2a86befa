"""train.py with one more model, bn_convnet: the smallest with batch norm, where the network itself does not matter.

TensorFlow compiles its step many times faster than a ResNet-20 with its 19 norms. With HOLD=STEP:FILE in its
environment, training waits as soon as it has a checkpoint of STEP or a later one, until FILE exists.
"""
import os
import runpy
import sys
import time
from pathlib import Path

from model_zoo import MODELS, ModelInfo

PROGRAM = Path(__file__)
NAME = "bn_convnet"
INFO = ModelInfo("tests.rigs.bn_train", NAME, 16)


def bn_convnet(x, classes, batch_norm_momentum, seed):
    """Three convolutions of 16, 32 and 64 channels, each with batch norm; the last two have stride 2. Some dropout.

    The norm of the last kernel is constant.
    """
    import tensorflow as tf

    from model_zoo.layers import BatchNormalization, Dropout, seeds
    from model_zoo.whitened_convnet import ConstantNorm

    numbers = seeds(seed)
    for channels, stride in ((16, 1), (32, 2), (64, 2)):
        start = tf.keras.initializers.HeNormal(next(numbers))
        constraint = ConstantNorm() if channels == 64 else None
        x = tf.keras.layers.Conv2D(channels, 3, stride, "same", use_bias=False, kernel_initializer=start,
                                   kernel_constraint=constraint)(x)
        x = tf.keras.layers.ReLU()(BatchNormalization(momentum=batch_norm_momentum)(x))
    start = tf.keras.initializers.RandomNormal(0, 0.01, next(numbers))
    pooled = Dropout(0.05, seed)(tf.keras.layers.GlobalAveragePooling2D()(x))
    return tf.keras.layers.Dense(classes, kernel_initializer=start, dtype="float32")(pooled)


def hold(step: int, file: str) -> None:
    from tests.rigs.trainings import newest_step
    from training.recovery import Recovery

    signals = Recovery.signals

    def held(self):
        saved = self._checkpoints  # of rank 0, for which the others wait
        while saved and self._setup.state.progress.step >= step and not os.path.exists(file) and (
                saved.is_writing or newest_step(self._folder.path) >= step):
            time.sleep(0.002)
        return signals(self)

    Recovery.signals = held


if __name__ == "__main__":
    MODELS[NAME] = INFO
    if "HOLD" in os.environ:
        after, _, until = os.environ["HOLD"].partition(":")
        hold(int(after), until)
    sys.argv[0] = str(PROGRAM.parents[2] / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
