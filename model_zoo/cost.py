"""The cost of training a model, as far as its layers determine it. It does not depend on the device."""
import math
from dataclasses import dataclass, replace

import model_zoo


@dataclass(frozen=True)
class ModelCost:
    """Counts over a model's layers.

    parameters: trainable parameters, which have gradients. variables: tensors that hold them. multiply_adds: of the
    forward pass per image, in convolutions and dense layers. statistics: batch norm's moving means and variances.
    name: of the model, at its own image size.
    """

    parameters: int
    variables: int
    multiply_adds: int
    statistics: int = 0
    name: str | None = None


# For 1,000 classes at 224 pixels, the usual reference.
RESNET50 = ModelCost(25_557_032, 161, 4_089_184_256, 53_120, "resnet50")


def model_cost(name: str, classes: int, image_size: int) -> ModelCost:
    """Builds the model to count, which takes seconds. The cost of ResNet-50 for ImageNet is stored."""
    if (name, classes, image_size) == ("resnet50", 1000, 224):
        return RESNET50
    cost = counted(model_zoo.create_model(name, classes, image_size))
    return replace(cost, name=name if image_size == model_zoo.MODELS[name].image_size else None)


def counted(model) -> ModelCost:
    """Returns the cost of a Keras model with a fixed image size."""
    from model_zoo.layers import layers_of

    return ModelCost(
        sum(math.prod(v.shape) for v in model.trainable_variables), len(model.trainable_variables),
        # Each weight of a kernel is used once at each position of the output. The kernel's shape accounts for groups.
        # One inside a layer of the user's own has no known output.
        sum(math.prod(layer.output_shape[1:-1]) * math.prod(getattr(layer, kernel).shape) for layer in layers_of(model)
            for kernel in ("kernel", "depthwise_kernel", "pointwise_kernel")
            if hasattr(layer, kernel) and hasattr(layer, "output_shape")),
        sum(math.prod(v.shape) for v in model.non_trainable_variables if v.dtype.is_floating))
