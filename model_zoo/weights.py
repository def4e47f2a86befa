"""Whether Keras can load ImageNet's weights here. Imports no TensorFlow, so that an error shows at once."""
import re
import urllib.error
import urllib.request
from pathlib import Path

from common.errors import UserError

KERAS_DOWNLOADS = "https://storage.googleapis.com"
SECONDS = 5


def check_weights(model: str) -> None:
    """Raises UserError if neither ~/.keras/models has weights of a network keras:NAME nor its server answers."""
    folder = Path.home() / ".keras" / "models"  # where Keras 2.15 keeps weights, whatever KERAS_HOME says
    name = model.partition(":")[2].lower()
    if any(name in re.sub(r"\W|_", "", path.name.lower()) for path in folder.glob("*.h5")):
        return
    try:
        urllib.request.urlopen(urllib.request.Request(KERAS_DOWNLOADS, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        raise UserError(f"--pretrained: {folder} has no weights of {model}, and {KERAS_DOWNLOADS} cannot be reached: "
                        f"{getattr(error, 'reason', error)}; download them on a computer with a network, and copy "
                        "~/.keras/models") from None
