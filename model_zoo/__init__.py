"""Models by name. Knows nothing of data, optimizers or Horovod.

The names can be listed, and a flag checked against them, without importing TensorFlow.
"""
import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInfo:
    """A line of the registry: the function that builds the model, what it is, and the image size it is meant for."""

    module: str
    function: str
    description: str
    image_size: int


MODELS = {
    "resnet20": ModelInfo("model_zoo.resnet", "resnet20", "ResNet-20 for 32-pixel images, arXiv:1512.03385, 4.2", 32),
    "convnet": ModelInfo("model_zoo.convnet", "convnet", "three convolutions, two dense layers, no batch norm", 32),
}


def create_model(name: str, classes: int, image_size: int, batch_norm_momentum: float = 0.9, seed: int = 0):
    """The Keras model registered under `name`.

    Input: float (batch, image_size, image_size, 3), normalised. Output: logits, float32 (batch, classes).
    """
    info = MODELS[name]
    build = getattr(importlib.import_module(info.module), info.function)
    return build(classes=classes, image_size=image_size, batch_norm_momentum=batch_norm_momentum, seed=seed)
