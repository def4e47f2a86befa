"""Writes a trained model as an HDF5 file of Keras's own layers, which Keras 2 and Keras 3 open without this package."""
import functools
import io
import json
import re
import warnings

import h5py
import numpy as np
import tensorflow as tf

from common.files import write_atomically
from inference.trained import Trained
from model_zoo.layers import BatchNormalization, Dropout, InputNormalization, ResidualSum

layers = tf.keras.layers
PER_CHANNEL = ("DepthwiseConv2D", "SeparableConv2D")  # Keras 3 refuses the `groups` that Keras 2.15 writes for them
JOINED = {"__operators__.add": layers.Add, "math.multiply": layers.Multiply}  # operation on two tensors -> layer
RESCALED = {  # operation with a constant -> factor and offset of the same computation
    "__operators__.add": lambda value: (1, value), "nn.bias_add": lambda value: (1, value),
    "math.subtract": lambda value: (1, -value), "math.multiply": lambda value: (value, 0),
    "math.truediv": lambda value: (1 / value, 0)}


WHOLE = {"start": None, "stop": None, "step": None}  # slices of a tensor, as Keras records them
REVERSED = WHOLE | {"step": -1}


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
        file.attrs["model_config"] = json.dumps(json.loads(file.attrs["model_config"], object_hook=_without_groups))
    write_atomically(path, written.getvalue())


def _without_groups(entry: dict) -> dict:
    if entry.get("class_name") in PER_CHANNEL:
        del entry["config"]["groups"]
    return entry


def stock_model(model):
    """Returns a copy of a functional model, with its weights, of Keras's own layers. Raises NotWritten."""
    if not getattr(model, "_is_graph_network", False):
        raise _not_stock(model)
    inputs = [layers.Input(tensor.shape[1:], name=name)
              for tensor, name in zip(model.inputs, model.input_names, strict=True)]
    copies, made = dict(zip(map(id, model.inputs), inputs, strict=True)), {}

    def copied(values):
        return tf.nest.map_structure(lambda value: copies.get(id(value), value), values)

    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if not node.is_input:
                if node.layer not in made:
                    made[node.layer] = _stock(node.layer)
                outputs = made[node.layer](*copied(node.call_args), **copied(node.call_kwargs))
                copies |= zip(map(id, tf.nest.flatten(node.outputs)), tf.nest.flatten(outputs), strict=True)
    for layer, copy in made.items():
        if layer.weights and not isinstance(layer, tf.keras.Model):
            copy.set_weights([own.reshape(other.shape)
                              for own, other in zip(layer.get_weights(), copy.weights, strict=True)])
    return tf.keras.Model(inputs, copied(model.outputs), name=model.name)


def _stock(layer):
    """Returns the layer of Keras that stands for a layer, or a function that applies several."""
    kind, name = type(layer), _name(layer)
    if isinstance(layer, tf.keras.Model):
        return stock_model(layer)
    if isinstance(layer, InputNormalization):
        mean, divisor = layer.numbers.numpy().astype(np.float64)
        return layers.Normalization(mean=mean.tolist(), variance=(divisor ** 2).tolist(), name=name)
    if isinstance(layer, ResidualSum):
        dropout, total = _dropout(layer, f"{name}_branch"), layers.Add(name=name)
        return lambda pair: total([dropout(pair[0]), pair[1]])
    if isinstance(layer, Dropout):
        return _dropout(layer, name)
    if kind.__name__ == "CustomScaleLayer":  # of InceptionResNetV2
        scale, total = layers.Rescaling(layer.scale, name=f"{name}_branch"), layers.Add(name=name)
        return lambda pair: total([pair[0], scale(pair[1])])
    if kind.__name__ == "LayerScale":  # of ConvNeXt
        return layers.DepthwiseConv2D(1, use_bias=False, name=name)
    if kind.__name__ in ("TFOpLambda", "SlicingOpLambda"):
        return functools.partial(_operation, layer)
    config = layer.get_config() | {"name": name}
    if kind is layers.Conv2D:
        config["groups"] = layer.input_shape[-1] // layer.kernel.shape[-2]  # inference.trained has split them
    if isinstance(layer, BatchNormalization):
        return layers.BatchNormalization.from_config(config)
    if not kind.__module__.startswith("keras.src.layers."):
        raise _not_stock(layer)
    try:
        return kind.from_config(config)
    except (TypeError, ValueError):  # it contains a layer that is none of Keras's
        raise _not_stock(layer) from None


def _not_stock(layer) -> NotWritten:
    return NotWritten(f"Keras has no layer like {layer.name}")


def _name(layer) -> str:
    return re.sub(r"\W", "_", layer.name)  # Keras 3 refuses slashes


def _dropout(layer, name: str):
    return layers.Dropout(layer._rate, layer._noise_shape, name=name)


def _operation(layer, x, *arguments, **options):
    """Applies what an operation computes, such as the scaling of pixels before a network of Keras."""
    function, name = layer.get_config()["function"], _name(layer)
    value = [*arguments, *options.values()][0]
    if function in JOINED and isinstance(value, type(x)):
        return JOINED[function](name=name)([x, value])
    if function in RESCALED:
        factor, offset = (np.asarray(number).tolist() for number in RESCALED[function](np.asarray(value, np.float64)))
        return layers.Rescaling(factor, offset, name=name)(x)
    if function == "__operators__.getitem" and value == (..., REVERSED):
        kernel = np.eye(x.shape[-1])[::-1]
        return layers.Conv2D(x.shape[-1], 1, use_bias=False, trainable=False, weights=[kernel[None, None]],
                             name=name)(x)
    if function == "__operators__.getitem" and [*value] == [WHOLE, *[WHOLE | {"step": value[-1]["step"]}] * 2]:
        return layers.AveragePooling2D(1, value[-1]["step"], name=name)(x)  # every second pixel
    if function.endswith("pad") and not np.any(value[:3]):  # of the channels
        return layers.ZeroPadding2D(((0, 0), value[3]), data_format="channels_first", name=name)(x)
    raise _not_stock(layer)
