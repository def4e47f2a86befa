"""Finds images that a dataset holds more than once, also under two labels or in both splits."""
import hashlib
import os
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from data import checksums
from data.dataset import Dataset, Split
from data.image_files import THREADS

SHOWN = 3  # pairs of names in a line
END = 256  # bytes at the end of a file, which differ even if a camera's headers do not


def duplicates(dataset: Dataset) -> list[list[tuple[str, int, int]]]:
    """Returns the groups of images with the same bytes: (split, sample, label) of each image.

    dataset: that data.prepare has just written, with checksums, or a folder of images. Only images that may be equal
    are read. Raises OSError.
    """
    splits = {"train": dataset.train, "validation": dataset.validation}
    known = {name: _checksums(split) for name, split in splits.items()}
    values, counts = np.unique(np.concatenate([*known.values()]), return_counts=True)
    groups = defaultdict(list)
    for name, split in splits.items():
        samples = np.flatnonzero(np.isin(known[name], values[counts > 1]))
        records = split.records(samples) if len(samples) else ()
        for sample, (image, label) in zip(samples.tolist(), records, strict=True):
            groups[hashlib.sha256(image).digest()].append((name, sample, label))
    return [group for group in groups.values() if len(group) > 1]


def _checksums(split: Split) -> np.ndarray:
    """Returns a number for each image, int64 (samples,), which is the same for images with the same bytes."""
    if split.format != "folder":
        return np.concatenate([[], *map(checksums.of_images, split.paths)]).astype(np.int64)
    files = [f"{split.paths[0]}/{name}" for name in split.entries[0].files]
    with ThreadPoolExecutor(THREADS) as pool:
        return np.array([*pool.map(_of_file, files)], np.int64)


def _of_file(path) -> int:
    """Returns a checksum of the size and the end of a file."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - END))
        return zlib.crc32(file.read(), size)


def names(dataset: Dataset, groups: list) -> list[str]:
    """Returns the names of the images in the first of these groups."""
    def name(split, sample, _):
        part = getattr(dataset, split)
        return part.source_name(sample) or part.name(sample)

    return [" = ".join(name(*image) for image in group[:SHOWN]) for group in groups[:SHOWN]]
