"""The networks of tf.keras.applications, each with its own scaling of the pixels, and their ImageNet weights."""
import itertools
import sys
import urllib.request

import h5py
import tensorflow as tf
from keras.src.saving.legacy.hdf5_format import load_attributes_from_hdf5_group as attribute
from keras.src.utils import data_utils

from common.errors import UserError, one_line
from model_zoo import KERAS, MODELS
from model_zoo.layers import BatchNormalization, Dropout, dropout_of, last_layer, seeds
from model_zoo.weights import damage, weights_folder

layers = tf.keras.layers
MEAN = (0.485, 0.456, 0.406)  # of ImageNet's pixels, from 0 to 1
STD = (0.229, 0.224, 0.225)
POOLING = (layers.GlobalAveragePooling2D, layers.GlobalMaxPooling2D, layers.Flatten)  # before the last dense layers


def application(images, name, classes, batch_norm_momentum, seed):
    """Builds the network `keras:NAME` with untrained weights. images: pixels from 0 to 255, as Keras expects them.

    Batch norm, dropout and stochastic depth become Bigbatch's own layers, so that --batch_norm_span works and a resumed
    run draws the same masks. Initial weights are functions of the seed.
    """
    builder = _builder(name)
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

    file: weights of the same network in an .h5 file of Keras, with or without the layers after the last pooling.
    Default: ImageNet's, which Keras downloads.
    """
    name = model.name.replace("-", ":")
    path = file or _downloaded(name)
    given = _weights_in(path)
    ours = [layer for layer in model.layers if layer.weights and not isinstance(layer, layers.Normalization)]
    body = model.layers[:model.layers.index(ours[-1])]  # after which MobileNetV3 only flattens
    head = body[max(index for index, layer in enumerate(body) if type(layer) in POOLING):]
    new = []
    for layer, (source, arrays) in itertools.zip_longest(ours, given, fillvalue=("nothing", ())):
        if layer not in ours:
            raise UserError(f"{path} has the weights of another network than {name}: one more layer, {source}")
        variables = [*layer.trainable_weights, *layer.non_trainable_weights]  # the order in such a file
        shapes, found = [[list(one.shape) for one in many] for many in (variables, arrays)]
        if layer is ours[-1] or (shapes != found and layer in head):
            new.append(layer)
        elif shapes != found:
            raise UserError(f"{path} has the weights of another network than {name}: {source} {found} instead of "
                            f"{layer.name} {shapes}")
        else:
            for variable, array in zip(variables, arrays, strict=True):
                variable.assign(array)
    return new


def _weights_in(path) -> list[tuple[str, list]]:
    """Returns (name, arrays) of each layer with weights in an .h5 file of Keras. Raises UserError."""
    try:
        with h5py.File(path) as file:
            weights = file.get("model_weights", file)  # in a file with a whole model
            given = [(name, [(one, weights[name][one][()]) for one in attribute(weights[name], "weight_names")])
                     for name in attribute(weights, "layer_names")]
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:  # h5py raises them for a damaged file
        raise UserError(f"{path} cannot be read as an .h5 file of Keras: {one_line(error)[:200]}") from None
    given = [(name, pairs) for name, pairs in given if pairs and not name.startswith("normalization")]
    if not given:
        raise UserError(f"{path} has no weights of a Keras model; give a file that model.save_weights or model.save of "
                        "Keras 2 wrote as .h5")
    if problem := damage(path, [*itertools.chain.from_iterable(pairs for _, pairs in given)]):
        raise UserError(f"{path} is damaged: {problem}; copy or download it again")
    return [(name, [array for _, array in pairs]) for name, pairs in given]


class _Asked(Exception):
    """Raised in place of a download, with the arguments of tf.keras.utils.get_file."""


def source_of(name: str) -> dict:
    """Returns the arguments with which Keras would download ImageNet's weights of a network `keras:NAME`.

    fname: name of the file. origin: its address.
    """
    def ask(fname, origin, **options):
        raise _Asked(options | {"fname": fname, "origin": origin, "cache_subdir": str(weights_folder())})

    size = MODELS[name].image_size  # without which some write a warning
    data_utils.get_file, download = ask, data_utils.get_file
    try:
        _builder(name)(weights="imagenet", input_shape=(size, size, 3))
    except _Asked as asked:
        return asked.args[0]
    finally:
        data_utils.get_file = download
    raise AssertionError(f"Keras downloads no weights of {name}")


def no_download(source: dict, reason) -> UserError:
    """Returns the error that says where to have a file of `source_of` from, and where to copy it."""
    proxy = urllib.request.getproxies().get("https", "").rpartition("@")[2]  # without a password
    through = f" (https_proxy is {proxy})" if proxy else ""
    return UserError(f"--pretrained: {source['origin']} cannot be downloaded: {one_line(reason)[:200]}{through}; "
                     f"download it on a computer with a network and save it as {weights_folder() / source['fname']}, "
                     "or give its path with --pretrained_weights=FILE")


def _downloaded(name) -> str:
    source = source_of(name)
    try:
        return tf.keras.utils.get_file(**source)
    except Exception as error:  # Keras raises a plain Exception if a download fails
        raise no_download(source, error) from None


def _builder(name):
    return getattr(tf.keras.applications, name.removeprefix(KERAS))


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
