"""Pictures of images, for the files of a run."""
import io

import numpy as np
from PIL import Image


def joined(images: np.ndarray, columns: int) -> Image.Image:
    """Returns images, uint8 (number, height, width, 3), in rows of `columns`, filled up with black ones."""
    _, height, width, channels = images.shape
    filled = np.pad(images, [(0, -len(images) % columns), (0, 0), (0, 0), (0, 0)])
    rows = filled.reshape(-1, columns, height, width, channels).swapaxes(1, 2)
    return Image.fromarray(rows.reshape(-1, columns * width, channels))


def encoded(picture: Image.Image, file_format: str, **options) -> bytes:
    """Returns the content of an image file. options: of Pillow for this format."""
    saved = io.BytesIO()
    picture.save(saved, file_format, **options)
    return saved.getvalue()
