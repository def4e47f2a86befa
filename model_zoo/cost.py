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
    last_layer: int = 0  # parameters of the last layer

    def trained(self, freeze: bool) -> int:
        """Returns the number of parameters that are trained. freeze: whether only those of the last layer are."""
        return self.last_layer if freeze else self.parameters


# For 1,000 classes at 224 pixels, the usual reference.
RESNET50 = ModelCost(25_557_032, 161, 4_089_184_256, 53_120, "resnet50", 2_049_000)

# Millions of multiply-adds of a forward pass, at the model's own image size, for a forecast that builds no model.
FORWARD = {"alexnet": 720, "alexnet_bn": 720, "alexnet_bn5": 720, "resnet18": 1814, "resnet34": 3663, "resnet50": 4089,
           "resnet101": 7801, "resnet152": 11514, "resnet50_v1": 3858, "resnet101_v1": 7570, "resnet152_v1": 11282,
           "resnet50_nvcaffe": 3858, "resnet20": 40.6, "resnet10_narrow": 17, "convnet": 2.93, "convnet_bn": 2.93,
           "whitened_convnet": 118}
RESNET50_KEPT = 22_761_068  # values of the forward pass, per image, that its backward pass needs
RESNET50_LARGEST = 2_558_976  # and with --freeze: see training_memory
HELD = ("Const", "ReadVariableOp")  # operations whose values do not depend on the images
PER_PARAMETER = 16  # bytes: weight, gradient, and two moments or a moment and a buffer of the exchange
PER_FROZEN_PARAMETER = 4


def model_cost(name: str, classes: int, image_size: int) -> ModelCost:
    """Builds the model to count, which takes seconds. The cost of ResNet-50 for ImageNet is stored."""
    if (name, classes, image_size) == ("resnet50", 1000, 224):
        return RESNET50
    cost = counted(model_zoo.create_model(name, classes, image_size))
    return replace(cost, name=name if image_size == model_zoo.MODELS[name].image_size else None)


def forward(name: str, image_size: int) -> float:
    """Returns about how many multiply-adds a forward pass for one image takes; 0 for a model that is not in FORWARD."""
    if name not in FORWARD:
        return 0.0
    return FORWARD[name] * 1e6 * (image_size / model_zoo.MODELS[name].image_size) ** 2


def counted(model) -> ModelCost:
    """Returns the cost of a Keras model with a fixed image size."""
    from model_zoo.layers import last_layer, layers_of, norms

    return ModelCost(
        sum(math.prod(v.shape) for v in model.trainable_variables), len(model.trainable_variables),
        # Each weight of a kernel is used once at each position of the output. The kernel's shape accounts for groups.
        # One inside a layer of the user's own has no known output.
        sum(math.prod(layer.output_shape[1:-1]) * math.prod(getattr(layer, kernel).shape) for layer in layers_of(model)
            for kernel in ("kernel", "depthwise_kernel", "pointwise_kernel")
            if hasattr(layer, kernel) and hasattr(layer, "output_shape")),
        sum(2 * layer.moving_mean.shape[0] for layer in norms(model)),
        last_layer=sum(math.prod(v.shape) for v in last_layer(model).trainable_variables))


def is_known(name: str) -> bool:
    """Whether training_memory builds no model."""
    return name == RESNET50.name


def training_memory(name: str, image_size: int, bytes_per_value: int, freeze: bool = False) -> tuple[float, float]:
    """Returns the bytes that training takes for an image of a micro-batch, and those that it takes for any number.

    The former are the values of the forward pass that the backward pass needs. With --freeze, it needs none from before
    the last layer: they are the images, and the inputs and outputs of the operation that has the most of them, because
    what the forward pass keeps for later, as for a shortcut, is less. ResNet-50's are stored for 224 pixels, and grow
    with the number of pixels. Any other model is built, which takes seconds.
    """
    if is_known(name):
        values = (RESNET50_LARGEST if freeze else RESNET50_KEPT) * (image_size / 224) ** 2
        parameters, trained = RESNET50.parameters, RESNET50.trained(freeze)
    else:
        values, parameters, trained = _traced(name, image_size, freeze)
    return values * bytes_per_value, PER_PARAMETER * trained + PER_FROZEN_PARAMETER * (parameters - trained)


def _traced(name, image_size, freeze) -> tuple[int, int, int]:
    """Returns the values per image, the parameters and the trained parameters of a model that is built."""
    import tensorflow as tf

    from model_zoo.layers import trained_variables

    model, forward = model_zoo.create_model(name, 1000, image_size), {}
    variables = trained_variables(model, freeze)

    @tf.function(autograph=False)
    def gradients(images):
        with tf.GradientTape() as tape:
            logits = model(images, training=not freeze)
        forward.update((operation.name, operation) for operation in logits.graph.get_operations())
        return tape.gradient(logits, variables)

    def count(values) -> int:
        return sum({value.name: value.shape.num_elements() or 0 for value in values
                    if value.op.name in forward and value.op.type not in HELD}.values())

    graph = gradients.get_concrete_function(tf.TensorSpec([1, image_size, image_size, 3])).graph
    if freeze:
        values = count(graph.inputs[:1]) + max(count((*one.inputs, *one.outputs)) for one in forward.values())
    else:
        values = count(value for one in graph.get_operations() if one.name not in forward for value in one.inputs)
    return values, *(sum(math.prod(v.shape) for v in some) for some in (model.trainable_variables, variables))
