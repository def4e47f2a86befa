"""The networks of tf.keras.applications, each with its own scaling of the pixels, and their ImageNet weights."""
import sys

import tensorflow as tf

from common.errors import UserError, one_line
from model_zoo import KERAS
from model_zoo.layers import BatchNormalization, Dropout, dropout_of, last_layer, seeds

layers = tf.keras.layers
MEAN = (0.485, 0.456, 0.406)  # of ImageNet's pixels, from 0 to 1
STD = (0.229, 0.224, 0.225)


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

    clone = tf.keras.models.clone_model(network, clone_function=own)
    return clone.call(_preprocessing(builder)(images))


def load_pretrained(model) -> list:
    """Gives a model of `application` ImageNet's weights. Returns the layers that keep their own.

    These are the last layer, and the first dense one of VGG if the image size is not Keras's. Keras downloads the
    weights into ~/.keras/models. Raises UserError if it cannot.
    """
    try:
        trained = _builder(model.name.replace("-", ":"))(weights="imagenet")
    except Exception as error:  # Keras raises a plain Exception if a download fails
        raise UserError(f"--pretrained: Keras cannot load the weights: {one_line(error)[:200]}; on a computer with a "
                        "network it downloads them into ~/.keras/models, which you can copy") from None
    ours, theirs = (
        [layer for layer in network.layers if layer.weights and not isinstance(layer, layers.Normalization)]
        for network in (model, trained))
    new = []
    for layer, source in zip(ours, theirs, strict=True):
        if layer is ours[-1] or [own.shape for own in layer.weights] != [given.shape for given in source.weights]:
            new.append(layer)
        else:
            layer.set_weights(source.get_weights())
    return new


def _builder(name):
    return getattr(tf.keras.applications, name.removeprefix(KERAS))


def _preprocessing(builder):
    return sys.modules[builder.__module__].preprocess_input


def _seeded(config, numbers) -> dict:
    """Returns a layer's configuration in which each initializer has a seed of its own."""
    return {key: value | {"config": value["config"] | {"seed": next(numbers)}}
            if isinstance(value, dict) and "seed" in value.get("config", {}) else value
            for key, value in config.items()}
