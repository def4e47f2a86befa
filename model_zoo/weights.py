"""Trained weights: whether they can be had here, ImageNet's of Keras, and whether they look damaged.

Imports no TensorFlow, except to download, so that an error shows at once.
"""
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.command import USERS_KERAS_HOME
from common.errors import UserError, complain, listed, one_line
from model_zoo import KERAS, MODELS
from model_zoo.weight_files import layers_in

KERAS_DOWNLOADS = "https://storage.googleapis.com"
SECONDS = 5


def weights_folder() -> Path:
    """Returns the folder of the weights that Keras has downloaded: models/ in KERAS_HOME, by default in ~/.keras."""
    return Path(os.environ.get(USERS_KERAS_HOME) or "~/.keras").expanduser() / "models"


def check_weights(model: str, file: str | None = None) -> None:
    """Raises UserError if a file has no weights of Keras, or without one, if there are none of keras:NAME here, nor a
    network.
    """
    if file:
        layers_in(file)
        return
    name = model.partition(":")[2].lower()
    if any(name in re.sub(r"\W|_", "", path.name.lower()) for path in weights_folder().glob("*.h5")):
        return
    try:
        urllib.request.urlopen(urllib.request.Request(KERAS_DOWNLOADS, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, http.client.HTTPException) as error:  # the latter for an odd proxy, or what it answers
        raise no_download(source_of(model), getattr(error, "reason", error)) from None


def can_be_had(model: str) -> bool:
    """Whether the weights of keras:NAME are here, or the server that has them answers."""
    try:
        check_weights(model)
    except UserError:
        return False
    return True


class _Asked(Exception):
    """Raised in place of a download, with the arguments of tf.keras.utils.get_file."""


def builder_of(name: str):
    """Returns the function of tf.keras.applications that builds the network `keras:NAME`."""
    import tensorflow as tf

    return getattr(tf.keras.applications, name.removeprefix(KERAS))


def source_of(name: str) -> dict:
    """Returns the arguments with which Keras would download ImageNet's weights of a network `keras:NAME`.

    fname: name of the file. origin: its address.
    """
    from keras.src.utils import data_utils

    def ask(fname, origin, **options):
        raise _Asked(options | {"fname": fname, "origin": origin, "cache_subdir": str(weights_folder())})

    size = MODELS[name].image_size  # without which some write a warning
    data_utils.get_file, download = ask, data_utils.get_file
    try:
        builder_of(name)(weights="imagenet", input_shape=(size, size, 3))
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


def downloaded(name: str) -> str:
    """Returns the path of ImageNet's weights of a network `keras:NAME`. Raises UserError."""
    import tensorflow as tf

    source = source_of(name)
    try:
        return tf.keras.utils.get_file(**source)
    except Exception as error:  # Keras raises a plain Exception if a download fails
        raise no_download(source, error) from None


def damage(source, weights: Sequence[tuple[str, np.ndarray]]) -> str | None:
    """Returns which of the weights that were read have infinite or NaN values, in words, or None.

    Says on standard error which kernels are all zeros, as only few trained ones are.

    source: where they were read. weights: pairs of a name and an array.
    """
    for name, array in weights:
        if not np.isfinite(array).all():
            return f"{name} has infinite or NaN values"
    if zeros := [name for name, array in weights if np.ndim(array) > 1 and not np.any(array)]:
        complain(f"warning: {source} may be damaged: all values of {listed(zeros, 1, what='kernels')} are 0")
    return None
