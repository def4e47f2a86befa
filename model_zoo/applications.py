"""The networks of tf.keras.applications, each with its own scaling of the pixels, and their ImageNet weights."""
import contextlib
import itertools
import math
import sys

import tensorflow as tf

from common.errors import UserError, complain
from model_zoo.layers import BatchNormalization, Dropout, dropout_of, last_layer, layers_of, seeds
from model_zoo.weight_files import AGAIN, Leaves, keys, layers_in
from model_zoo.weights import builder_of, damage, downloaded

layers = tf.keras.layers
MEAN = (0.485, 0.456, 0.406)  # of ImageNet's pixels, from 0 to 1
STD = (0.229, 0.224, 0.225)
POOLING = (layers.GlobalAveragePooling2D, layers.GlobalMaxPooling2D, layers.Flatten)  # before the last dense layers


def application(images, name, classes, batch_norm_momentum, seed):
    """Builds the network `keras:NAME` with untrained weights. images: pixels from 0 to 255, as Keras expects them.

    Batch norm, dropout and stochastic depth become Bigbatch's own layers, so that --batch_norm_span works and a resumed
    run draws the same masks. Initial weights are functions of the seed.
    """
    builder = builder_of(name)
    numbers = seeds(seed)
    network = builder(weights=None, classes=classes, classifier_activation=None, input_shape=images.shape[1:])
    head = network.layers[network.layers.index(last_layer(network)):]  # in float32, as for every model

    def own(layer):
        config = _seeded(layer.get_config(), numbers)
        if type(layer) is layers.BatchNormalization:
            return BatchNormalization.from_config(config | {"momentum": batch_norm_momentum})
        if dropout := dropout_of(layer):
            rate, noise_shape = dropout
            return Dropout(rate, next(numbers), noise_shape, name=layer.name)
        if type(layer) is layers.Normalization and layer.input_mean is None:  # of EfficientNet, unknown without weights
            return layers.Normalization(mean=MEAN, variance=[std ** 2 for std in STD], name=layer.name)
        return type(layer).from_config(config | ({"dtype": "float32"} if layer in head else {}))

    made = {layer: own(layer) for layer in network.layers if not isinstance(layer, layers.InputLayer)}
    for node in itertools.chain(*network._nodes_by_depth.values()):
        node.layer = made.get(node.layer, node.layer)
    return network.call(_preprocessing(builder)(images))  # clone_model would call each layer once more


def load_pretrained(model, file: str | None = None) -> list:
    """Gives a model of `application` trained weights. Returns the layers that keep their own.

    These are the last layer, and those after the last pooling that the weights lack or have in another shape, such as
    the first dense one of VGG if the image size differs. Raises UserError.

    file: weights of the same network in an .h5 file of Keras, with any layers after the last pooling. The network may
    be a model in the file's model. Default: ImageNet's, which Keras downloads.
    """
    name = model.name.replace("-", ":")
    path = file or downloaded(name)
    parts = layers_in(path)
    ours = [layer for layer in layers_of(model) if layer.weights and not isinstance(layer, layers.Normalization)]
    body = model.layers[:model.layers.index(ours[-1])]  # after which MobileNetV3 only flattens
    head = body[max(index for index, layer in enumerate(body) if type(layer) in POOLING):]
    taken = _fitting(ours, head, parts, path, name)
    if problem := damage(path, [pair for weights in taken.values() for pair in weights.items()]):
        raise UserError(f"{path} is damaged: {problem}; {AGAIN}")
    for layer, weights in taken.items():
        for variable, array in zip(_variables(layer), weights.values(), strict=True):
            variable.assign(array.reshape(variable.shape))
    return [layer for layer in ours if layer not in taken]


def _fitting(ours, head, parts: dict[str, Leaves], path, name) -> dict:
    """Returns what `_placed` does for the model in a file's model that fits, or else for the file's whole model.

    parts: the layers of the file's model, each with those in it. Raises UserError.
    """
    fitting = {}
    for part, inside in parts.items():
        for by_name in (True, False):
            with contextlib.suppress(_Misfit):
                fitting.setdefault(part, _placed(ours, head, [*inside.items()], by_name))
    if len(fitting) > 1:
        raise UserError(f"{path} has {len(fitting)} models that fit {name}: {', '.join(fitting)}; write the weights of "
                        f"one of them: model.get_layer('{min(fitting)}').save('weights.h5')")
    for part, taken in fitting.items():
        before = [one for one in itertools.takewhile(part.__ne__, parts) if one.startswith(("rescal", "normaliz"))]
        scaling = f", without {', '.join(before)}: {name} scales pixels like Keras's preprocess_input" if before else ""
        complain(f"note: the model {part} in {path} is taken" + scaling)
        return taken
    try:
        whole = [leaf for inside in parts.values() for leaf in inside.items()]
        return _placed(ours, head, whole, by_name=False)
    except _Misfit as misfit:
        raise UserError(f"{path} has the weights of another network than {name}: {misfit}; give the --model whose "
                        "weights they are, or write those of the part that fits: base.save('weights.h5')") from None


class _Misfit(Exception):
    """Raised with the first difference between a network and weights that do not fit it."""


def _placed(ours, head, theirs: list[tuple[str, dict]], by_name: bool) -> dict:
    """Returns a dict from layers to the weights that they get: those of the same name or position. Raises _Misfit.

    ours: the network's layers with weights. head: its layers after the last pooling. theirs: names and weights of the
    layers in a file.
    """
    own, given = [layer.name for layer in ours], [name for name, _ in theirs]
    own, given = (keys(own), keys(given)) if by_name else (range(len(own)), range(len(given)))
    left, taken = dict(zip(given, theirs, strict=True)), {}
    for key, layer in zip(own, ours, strict=True):
        source, weights = left.pop(key, ("nothing", {}))
        shapes, found = [[[*one.shape] for one in many] for many in (_variables(layer), weights.values())]
        if type(layer).__name__ == "LayerScale" and found:  # in an exported model.h5 a convolution of each channel
            found = [[math.prod(shape)] for shape in found]
        if shapes == found and layer is not ours[-1]:
            taken[layer] = weights
        elif layer not in head and layer is not ours[-1]:
            raise _Misfit(f"{source} {found} instead of {layer.name} {shapes}")
    if more := [source for source, weights in left.values() if any(one.ndim > 2 for one in weights.values())]:
        raise _Misfit(f"one more layer, {more[0]}")
    return taken


def _variables(layer) -> list:
    return [*layer.trainable_weights, *layer.non_trainable_weights]  # the order in a file


def _preprocessing(builder):
    return sys.modules[builder.__module__].preprocess_input


def _seeded(config, numbers) -> dict:
    """Returns a layer's configuration in which each initializer has a seed of its own, also of layers in the layer."""
    seeded = {key: value | {"config": value["config"] | {"seed": next(numbers)}}
              if isinstance(value, dict) and "seed" in value.get("config", {}) else value
              for key, value in config.items()}
    if "layers" in config:  # of a Sequential, such as the stem of ConvNeXt
        seeded["layers"] = [one | {"config": _seeded(one["config"], numbers)} for one in config["layers"]]
    return seeded
