"""The cost of training a model, as far as its layers determine it. It does not depend on the device."""
import math
from dataclasses import dataclass, replace

import model_zoo


@dataclass(frozen=True)
class ModelCost:
    """Counts over a model's layers."""

    parameters: int  # trainable ones, which have gradients
    variables: int  # tensors that hold the parameters
    multiply_adds: int  # of the forward pass for one image, in convolutions and dense layers
    statistics: int = 0  # numbers in batch norm's moving means and variances
    name: str | None = None  # of the model; None: at another image size than its default


# For 1,000 classes at 224 pixels, the usual reference.
RESNET50 = ModelCost(25_557_032, 161, 4_089_184_256, 53_120, "resnet50")

RESNET50_KEPT = 22_761_068  # values of the forward pass, per image, that its backward pass needs
HELD = ("Const", "ReadVariableOp")  # operations whose values do not depend on the images
PER_PARAMETER = 16  # bytes: weight, gradient, and two moments or a moment and a buffer of the exchange


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


def is_known(name: str) -> bool:
    """Whether training_memory builds no model."""
    return name == RESNET50.name


def training_memory(name: str, image_size: int, bytes_per_value: int) -> tuple[float, float]:
    """Returns the bytes that training takes for an image of a micro-batch, and those that it takes for any number.

    The former are the values of the forward pass that the backward pass needs. ResNet-50's are stored for 224 pixels,
    and grow with the number of pixels. Any other model is built, which takes seconds.
    """
    if is_known(name):
        return RESNET50_KEPT * (image_size / 224) ** 2 * bytes_per_value, PER_PARAMETER * RESNET50.parameters
    import tensorflow as tf

    model, forward = model_zoo.create_model(name, 1000, image_size), set()

    @tf.function(autograph=False)
    def gradients(images):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
        forward.update(operation.name for operation in logits.graph.get_operations())
        return tape.gradient(logits, model.trainable_variables)

    graph = gradients.get_concrete_function(tf.TensorSpec([1, image_size, image_size, 3])).graph
    kept = {value.name: value.shape.num_elements() or 0 for operation in graph.get_operations()
            if operation.name not in forward for value in operation.inputs
            if value.op.name in forward and value.op.type not in HELD}
    return (sum(kept.values()) * bytes_per_value,
            PER_PARAMETER * sum(math.prod(v.shape) for v in model.trainable_variables))
