"""The text file next to each shard in which data.prepare stores a line `CRC-32 label` for each image.

If the images come from files, each line continues with the name of the file in the source, escaped as in JSON.
"""
import functools
import json
import zlib
from pathlib import Path

import numpy as np

from data.staging.remote import Missing, RemotePath, is_remote


def path_of(shard) -> Path | RemotePath:
    return shard.with_name(f"{shard.name}.crc32")


def line(image: bytes, label: int, name: str | None = None) -> str:
    return f"{zlib.crc32(image):08x} {label}" + (f" {json.dumps(name)[1:-1]}" if name is not None else "") + "\n"


def lines(shard) -> list[list[str]]:
    """Returns [CRC-32, label, name if there is one] of each image. Raises OSError if the shard has no checksums.

    For an object in a bucket, this is Missing.
    """
    text = _text_of_object(shard) if is_remote(shard) else path_of(shard).read_text()
    return [row.split(" ", 2) for row in text.splitlines()]


@functools.lru_cache(maxsize=8)
def _text_of_object(shard) -> str:
    """Fetches once what is asked for one record after another."""
    return path_of(shard).read_text()


def of_images(shard) -> np.ndarray | None:
    """Returns the CRC-32 of each image, uint32 (samples,), or None if an object in a bucket has no checksums."""
    try:
        return np.array([int(checksum, 16) for checksum, *_ in lines(shard)], np.uint32)
    except Missing:
        return None


def labels(shard) -> np.ndarray | None:
    """Returns the label of each image, int64 (samples,). None: there are no checksums, or the shard is an object."""
    try:
        return None if is_remote(shard) else np.array([label for _, label, *_ in lines(shard)], np.int64)
    except (OSError, ValueError):
        return None


def source_name(shard, record: int) -> str | None:
    """Returns the name of the file from which an image was prepared, or None if it is not stored."""
    names = source_names(shard)
    return names[record] if names else None


def source_names(shard) -> list[str] | None:
    """Returns the names of the files from which the images of a shard were prepared, or None if they are not stored."""
    try:
        return [json.loads(f'"{name}"') for _, _, name in lines(shard)]
    except (OSError, ValueError):
        return None
