"""Models by name. Knows nothing of data, optimizers or Horovod.

The names can be listed, and a flag checked against them, without importing TensorFlow.
"""
import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInfo:
    """A line of the registry: the function from pixels to logits, what it is, and the image size it is meant for."""

    module: str
    function: str
    description: str
    image_size: int


MODELS = {
    "alexnet": ModelInfo("model_zoo.alexnet", "alexnet", "BVLC AlexNet: groups, LRN, dropout", 227),
    "alexnet_bn": ModelInfo("model_zoo.alexnet", "alexnet_bn", "AlexNet with batch norm for LRN", 227),
    **{f"resnet{depth}": ModelInfo("model_zoo.resnet", f"resnet{depth}", f"ResNet-{depth} v1.5", 224)
       for depth in (18, 34, 50, 101, 152)},
    **{f"resnet{depth}_v1": ModelInfo("model_zoo.resnet", f"resnet{depth}_v1", f"ResNet-{depth} v1, as first published",
                                      224) for depth in (50, 101, 152)},
    "resnet20": ModelInfo("model_zoo.resnet", "resnet20", "ResNet-20 for 32-pixel images, arXiv:1512.03385, 4.2", 32),
    "convnet": ModelInfo("model_zoo.convnet", "convnet", "three convolutions, two dense layers, no batch norm", 32),
}


def create_model(name: str, classes: int, image_size: int, batch_norm_momentum: float = 0.9, seed: int = 0,
                 stream: int = 0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)):
    """The Keras model registered under `name`.

    Input: pixels (batch, image_size, image_size, 3), RGB, uint8 or float; mean and std, of each channel, are taken out
    of them first, in float32. Output: logits, float32 (batch, classes).
    seed: of the initial weights and of dropout. stream: a number of the worker's own, to draw dropout masks of its own.
    """
    import tensorflow as tf

    info = MODELS[name]
    build = getattr(importlib.import_module(info.module), info.function)
    images = tf.keras.Input((image_size, image_size, 3), dtype="float32")
    pixels = tf.keras.layers.Normalization(mean=mean, variance=[deviation ** 2 for deviation in std], dtype="float32",
                                           name="input_normalization")(images)
    logits = build(pixels, classes=classes, batch_norm_momentum=batch_norm_momentum, seed=seed, stream=stream)
    return tf.keras.Model(images, logits, name=name)
