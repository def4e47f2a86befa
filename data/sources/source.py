"""What a dataset is made from: encoded images with labels, before they are written in a format."""
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Source:
    """classes: names in label order. splits: train and validation, each makes its (encoded image, label) pairs, in
    the order in which they are to be written; counts: how many. mean, std: of the pixels, 0 to 255, grey or (red,
    green, blue).
    """

    classes: tuple[str, ...]
    splits: dict[str, Callable[[], Iterable[tuple[bytes, int]]]]
    counts: dict[str, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def encode_grey(pixels: np.ndarray) -> bytes:
    """Grey pixels of 0 to 255, (height, width), as JPEG."""
    from PIL import Image

    encoded = io.BytesIO()
    Image.fromarray(np.clip(np.round(pixels), 0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=95)
    return encoded.getvalue()
