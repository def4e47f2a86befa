"""Writes a trained model as an HDF5 file of Keras's own layers, which Keras 2 and Keras 3 open without this package."""
import contextlib
import functools
import io
import itertools
import re
import warnings

import h5py
import numpy as np
import tensorflow as tf
from keras.src.engine.keras_tensor import KerasTensor

from common.files import write_atomically
from inference.trained import Trained
from model_zoo.layers import BatchNormalization, Dropout, InputNormalization, ResidualSum, layers_of
from model_zoo.whitened_convnet import Whitening

layers = tf.keras.layers
PER_CHANNEL = (layers.DepthwiseConv2D, layers.SeparableConv2D)
REFUSED = ("groups", "kernel_initializer", "kernel_regularizer", "kernel_constraint")  # by Keras 3; 2.15 writes them
JOINED = {"__operators__.add": layers.Add, "math.multiply": layers.Multiply}  # operation on two tensors -> layer
RESCALED = {  # operation with a constant -> factor and offset of the same computation
    "__operators__.add": lambda value: (1, value), "nn.bias_add": lambda value: (1, value),
    "math.subtract": lambda value: (1, -value), "math.multiply": lambda value: (value, 0),
    "math.truediv": lambda value: (1 / value, 0)}
REVERSED = (..., {"start": None, "stop": None, "step": -1})  # [..., ::-1], as Keras records it


class NotWritten(Exception):
    """Raised with the reason why a file of an export cannot be written."""


def write_keras(trained: Trained, path) -> None:
    """Writes a Keras model atomically. Raises OSError, and NotWritten if a layer is none of Keras's.

    Input: pixels from 0 to 255, (batch, height, width, 3), RGB, of the network's size. Output: probabilities, float32
    (batch, classes), in label order.
    """
    model = stock_model(trained.model)
    outputs = layers.Activation("softmax", dtype="float32", name="probabilities")(model.output)
    written = io.BytesIO()
    with h5py.File(written, "w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the format's age
        tf.keras.models.save_model(tf.keras.Model(model.input, outputs, name=model.name), file, include_optimizer=False)
    write_atomically(path, written.getvalue())


def stock_model(model):
    """Returns a copy of a functional model, with its weights, of Keras's own layers. Raises NotWritten.

    Models in the model become part of it, because Keras 3 opens none in a file of Keras 2.
    """
    @functools.cache
    def stock(layer):
        return _applied(layer, stock) if isinstance(layer, tf.keras.Model) else _stock(layer)

    compute = stock(model)
    inputs = [layers.Input(tensor.shape[1:], name=name)
              for tensor, name in zip(model.inputs, model.input_names, strict=True)]
    outputs = compute(inputs)
    for layer in layers_of(model):
        if layer.weights:
            stock(layer).set_weights([own.reshape(other.shape) for own, other in zip(
                layer.get_weights(), stock(layer).weights, strict=True)])
    return tf.keras.Model(inputs, outputs, name=model.name)


def _applied(model, stock):
    """Returns the function that a functional model computes, with the layers that `stock` returns for its layers."""
    if not getattr(model, "_is_graph_network", False):
        raise _not_stock(model)
    copy = tf.keras.models.clone_model(model, clone_function=lambda layer: layer)  # only its calls of layers are new
    for call in itertools.chain.from_iterable(copy._nodes_by_depth.values()):
        if not call.is_input:
            call.layer = stock(call.layer)
    return copy.call


def _stock(layer):
    """Returns the layer of Keras that stands for a layer, or a function that applies several."""
    kind, name = type(layer), re.sub(r"\W", "_", layer.name)  # Keras 3 refuses slashes
    if kind.__name__ in ("TFOpLambda", "SlicingOpLambda"):
        return functools.partial(_operation, layer, name)
    if isinstance(layer, InputNormalization):
        mean, divisor = layer.numbers.numpy().astype(np.float64)
        return layers.Normalization(mean=mean.tolist(), variance=(divisor ** 2).tolist(), name=name)
    if isinstance(layer, Dropout):
        dropout, total = layers.Dropout(layer._rate, layer._noise_shape, name=name), layers.Add(name=f"{name}_sum")
        return (lambda pair: total([dropout(pair[0]), pair[1]])) if isinstance(layer, ResidualSum) else dropout
    if kind.__name__ == "CustomScaleLayer":  # of InceptionResNetV2
        scale, total = layers.Rescaling(layer.scale, name=name), layers.Add(name=f"{name}_sum")
        return lambda pair: total([pair[0], scale(pair[1])])
    kind = {BatchNormalization: layers.BatchNormalization, Whitening: layers.Conv2D}.get(kind, kind)
    with contextlib.suppress(NotImplementedError, TypeError, ValueError):  # of a layer, or one in it, without a config
        config = {key: value for key, value in layer.get_config().items() if not _is_own_start(key, value)}
        config["name"] = name
        if kind.__name__ == "LayerScale":  # of ConvNeXt
            kind, config = layers.DepthwiseConv2D, {"name": name, "kernel_size": 1, "use_bias": False}
        if kind is layers.Conv2D:
            config["groups"] = layer.input_shape[-1] // layer.kernel.shape[-2]  # inference.trained has split them
        if kind.__module__.startswith("keras.src.layers."):
            stock = kind.from_config(config)
            if kind in PER_CHANNEL:
                stock.get_config = lambda: {key: value for key, value in config.items() if key not in REFUSED}
            return stock
    raise _not_stock(layer)


def _is_own_start(key: str, setting) -> bool:
    """Whether a setting of a layer is an initializer or a constraint that is none of Keras's."""
    return (key.endswith(("_initializer", "_constraint")) and isinstance(setting, dict)
            and not str(setting.get("module")).startswith("keras"))


def _not_stock(layer) -> NotWritten:
    return NotWritten(f"Keras has no layer like {layer.name}")


def _operation(layer, own_name, x, *arguments, **options):
    """Applies what an operation computes, such as the scaling of pixels before a network of Keras."""
    function, value = layer.get_config()["function"], next(iter([*arguments, *options.values()]), None)
    are_tensors = [isinstance(one, KerasTensor) for one in (x, value)]
    if function in JOINED and are_tensors == [True, True]:
        return JOINED[function](name=own_name)([x, value])
    if function in RESCALED and are_tensors == [True, False]:
        factor, offset = (np.asarray(number).tolist() for number in RESCALED[function](np.asarray(value, np.float64)))
        return layers.Rescaling(factor, offset, name=own_name)(x)
    if function == "__operators__.getitem" and value == REVERSED:
        kernel = np.eye(x.shape[-1])[::-1]
        return layers.Conv2D(x.shape[-1], 1, use_bias=False, trainable=False, weights=[kernel[None, None]],
                             name=own_name)(x)
    raise _not_stock(layer)
