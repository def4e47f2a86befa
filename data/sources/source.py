"""Sources of datasets: encoded images with labels, before they are written in a format."""
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Source:
    """A source that makes its images.

    classes: names in label order. splits: for train and validation, a function that returns the (encoded image, label)
    pairs in the order in which they are written. counts: number of samples of each split. mean, std: of the pixels, 0
    to 255, (red, green, blue), three equal numbers for grey. digest: a hash of what was read from the user's files.
    """

    classes: tuple[str, ...]
    splits: dict[str, Callable[[], Iterable[tuple[bytes, int]]]]
    counts: dict[str, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    digest: bytes = b""


def encode_grey(pixels: np.ndarray, format: str = "JPEG") -> bytes:
    """Encodes grey pixels of 0 to 255, (height, width), as JPEG, or without loss as PNG."""
    from PIL import Image

    encoded = io.BytesIO()
    Image.fromarray(np.clip(np.round(pixels), 0, 255).astype(np.uint8)).save(encoded, format, quality=95)
    return encoded.getvalue()
