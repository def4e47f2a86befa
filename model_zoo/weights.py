"""Whether weights can be had here, and look damaged. Imports no TensorFlow, so that an error shows at once."""
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.command import USERS_KERAS_HOME
from common.errors import UserError, complain, listed

KERAS_DOWNLOADS = "https://storage.googleapis.com"
SECONDS = 5


def weights_folder() -> Path:
    """Returns the folder of the weights that Keras has downloaded: models/ in KERAS_HOME, by default in ~/.keras."""
    return Path(os.environ.get(USERS_KERAS_HOME) or "~/.keras").expanduser() / "models"


def check_weights(model: str, file: str | None = None) -> None:
    """Raises UserError if there is no such file, or without one, neither weights of keras:NAME nor a network."""
    if file:
        if not Path(file).is_file():
            raise UserError(f"--pretrained_weights: there is no file {file}")
        return
    name = model.partition(":")[2].lower()
    if any(name in re.sub(r"\W|_", "", path.name.lower()) for path in weights_folder().glob("*.h5")):
        return
    try:
        urllib.request.urlopen(urllib.request.Request(KERAS_DOWNLOADS, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, http.client.HTTPException) as error:  # the latter for an odd proxy, or what it answers
        from model_zoo.applications import no_download, source_of

        raise no_download(source_of(model), getattr(error, "reason", error)) from None


def can_be_had(model: str) -> bool:
    """Whether the weights of keras:NAME are here, or the server that has them answers."""
    try:
        check_weights(model)
    except UserError:
        return False
    return True


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
