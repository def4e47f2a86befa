"""Source: a folder with the four files of MNIST or of a set in its format, gzipped or not.

The files are IDX: a zero, a zero, the type of the values (8: bytes), the number of dimensions, each dimension as a
big-endian 32-bit integer, then the values. Their images are stored as PNG, without loss.
"""
import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np

from common.errors import UserError, one_line
from data.sources.source import Source, of_arrays

FILES = {"train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
         "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")}
BYTES = 8


def is_idx(folder: Path) -> bool:
    """Returns whether a folder is meant as this source, that is, whether it holds a part of it."""
    return any(_path(folder, name) for names in FILES.values() for name in names)


def idx(folder: Path) -> Source:
    """Reads the folder. Its classes are called 0, 1, and so on, because the files have no names. Raises UserError."""
    splits = read(folder)
    classes = 1 + max(int(labels.max()) for _, labels in splits.values())
    return of_arrays(splits, [str(label) for label in range(classes)])


def read(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns images, uint8 (samples, height, width), and labels, uint8 (samples,), of each split. Raises UserError."""
    splits = {}
    for split, (images, labels) in FILES.items():
        pixels, numbers = _array(folder, images, 3), _array(folder, labels, 1)
        if len(pixels) != len(numbers):
            raise UserError(f"{folder}: {images} has {len(pixels)} images but {labels} has {len(numbers)} labels")
        if not pixels.size:
            raise UserError(f"{folder}: {images} contains no images")
        splits[split] = pixels, numbers
    return splits


def _path(folder, name) -> Path | None:
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def _array(folder, name, dimensions) -> np.ndarray:
    path = _path(folder, name)
    if not path:
        raise UserError(f"{folder} has neither {name} nor {name}.gz; all four files are needed")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None
    start = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", content[4:start]) if len(content) >= start else ()
    if content[:4] != bytes((0, 0, BYTES, dimensions)) or len(content) - start != prod(shape):
        raise UserError(f"{path} is not an IDX file of {dimensions}-dimensional bytes, or is truncated; copy it again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
