"""What a model costs to train, as far as its layers tell. Knows no device."""
import math
from dataclasses import dataclass

import model_zoo


@dataclass(frozen=True)
class ModelCost:
    """parameters: trainable, those that have gradients; variables: the tensors that hold them; multiply_adds: of one
    image's forward pass, in convolutions and dense layers."""

    parameters: int
    variables: int
    multiply_adds: int


RESNET50 = ModelCost(25_557_032, 161, 4_089_184_256)  # for 1,000 classes at 224 pixels: the usual yardstick


def model_cost(name: str, classes: int, image_size: int) -> ModelCost:
    """Builds the model to count, which takes seconds, unless it is ResNet-50 as ImageNet has it."""
    if (name, classes, image_size) == ("resnet50", 1000, 224):
        return RESNET50
    model = model_zoo.create_model(name, classes, image_size)
    return ModelCost(
        sum(math.prod(v.shape) for v in model.trainable_variables), len(model.trainable_variables),
        # Each weight of a kernel is used once at each place of the layer's output; groups are in the kernel's shape.
        sum(math.prod(layer.output_shape[1:-1]) * math.prod(layer.kernel.shape) for layer in model.layers
            if hasattr(layer, "kernel")))
