"""What a source of a dataset gives: images that it makes, or the location and the label of images in files."""
import functools
import hashlib
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WHOLE_FILE = -1  # size of an item that is a file in a folder


@dataclass(frozen=True)
class Source:
    """A source that makes its images."""

    classes: tuple[str, ...]  # names in label order
    # For train and validation, a function that returns the (encoded image, label) pairs in the order of writing.
    splits: dict[str, Callable[[], Iterable[tuple[bytes, int]]]]
    counts: dict[str, int]  # number of samples of each split
    mean: tuple[float, float, float]  # of the pixels, 0 to 255, RGB: three equal numbers for grey
    std: tuple[float, float, float]
    digest: bytes = b""  # a hash of what was read from the user's files


def encode(pixels: np.ndarray, format: str = "JPEG") -> bytes:
    """Encodes pixels of 0 to 255, grey (height, width) or RGB (height, width, 3), as JPEG, or without loss as PNG."""
    from PIL import Image

    encoded = io.BytesIO()
    Image.fromarray(np.clip(np.round(pixels), 0, 255).astype(np.uint8)).save(encoded, format, quality=95)
    return encoded.getvalue()


def of_arrays(splits: dict[str, tuple[np.ndarray, np.ndarray]], classes: list[str]) -> Source:
    """Returns a source of the images and labels of each split, stored as PNG.

    Images are grey, uint8 (samples, height, width), or RGB, uint8 (samples, height, width, 3). Labels are uint8
    (samples,).
    """
    def encoded(images, labels):
        return lambda: ((encode(image, "PNG"), int(label)) for image, label in zip(images, labels, strict=True))

    digest = hashlib.sha256()
    for array in (array for split in splits.values() for array in split):
        digest.update(repr(array.shape).encode() + array.tobytes())
    pixels, _ = splits["train"]
    channels = np.moveaxis(pixels, -1, 0) if pixels.ndim == 4 else [pixels] * 3
    means = [float(channel.mean()) for channel in channels]
    squares = [float(np.square(channel, dtype=np.uint16).mean()) for channel in channels]
    return Source(tuple(classes), {split: encoded(*arrays) for split, arrays in splits.items()},
                  {split: len(labels) for split, (_, labels) in splits.items()},
                  mean=tuple(round(mean, 3) for mean in means),
                  std=tuple(max(1.0, round((square - mean * mean) ** 0.5, 3))
                            for mean, square in zip(means, squares, strict=True)), digest=digest.digest())


def held_out(splits: dict[str, tuple[np.ndarray, np.ndarray]], parts: int) -> dict:
    """Returns the training images without the last 1 / parts of them, which replace the validation images."""
    images, labels = splits["train"]
    kept = len(labels) - len(labels) // parts
    return {"train": (images[:kept], labels[:kept]), "validation": (images[kept:], labels[kept:])}


@dataclass(frozen=True)
class Items:
    """A list of images with one column per property, because every rank holds it and there may be millions of items."""

    container: str  # a folder, or an archive
    offset: np.ndarray  # position of each item's bytes in the archive, int64 (items,)
    size: np.ndarray  # number of these bytes, int64 (items,); WHOLE_FILE in a folder
    labels: np.ndarray  # int32 (items,)
    names: list[str]  # paths within the folder, or names for messages

    def __len__(self):
        return len(self.names)

    def read(self, number: int) -> bytes:
        """Returns an item's bytes. Raises OSError."""
        size = int(self.size[number])
        if size == WHOLE_FILE:
            return Path(self.container, self.names[number]).read_bytes()
        encoded = os.pread(_opened(self.container), size, int(self.offset[number]))
        if len(encoded) != size:
            raise OSError(f"{self.container} ends inside this image")
        return encoded

    def chosen(self, numbers: np.ndarray) -> "Items":
        return Items(self.container, self.offset[numbers], self.size[numbers], self.labels[numbers],
                     [self.names[number] for number in numbers])

    def digest(self) -> bytes:
        """Returns a hash that identifies this listing, wherever its files are."""
        digest = hashlib.sha256("\0".join(self.names).encode(errors="surrogateescape"))
        for column in (self.offset, self.size, self.labels):
            digest.update(column.tobytes())
        return digest.digest()


@dataclass(frozen=True)
class Listed:
    """A source of images in files. splits: train and validation."""

    classes: tuple[str, ...]
    splits: dict[str, Items]

    @property
    def counts(self) -> dict[str, int]:
        return {split: len(items) for split, items in self.splits.items()}

    @property
    def digest(self) -> bytes:
        """A hash that identifies the listing of all splits."""
        return b"".join(items.digest() for items in self.splits.values())


def files(folder: str, names: list[str], labels) -> Items:
    """Lists the files of a folder, each of which is an image."""
    return Items(folder, np.zeros(len(names), np.int64), np.full(len(names), WHOLE_FILE, np.int64),
                 np.array(labels, np.int32), names)


def members(archive: str, rows: list[tuple[str, int, int]], labels) -> Items:
    """Lists the members of an archive. rows: (name, offset, size) of each."""
    columns = np.array([row[1:] for row in rows], np.int64).reshape(-1, 2)
    return Items(archive, columns[:, 0].copy(), columns[:, 1].copy(), np.array(labels, np.int32),
                 [row[0] for row in rows])


@functools.lru_cache(maxsize=8)
def _opened(path) -> int:
    return os.open(path, os.O_RDONLY)
