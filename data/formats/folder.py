"""Images in one folder per class, read in place (data.class_folders). Each split is one shard."""
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.class_folders import Listing

SUFFIX = ""
ANY_ORDER = True
read_index = Listing


def index_path(path) -> None:
    return None


def source_name(path, index: Listing, sample: int) -> str:
    return index.files[sample]


def records(path, index: Listing, samples) -> Iterator[tuple[bytes, int]]:
    for number in samples:
        yield (Path(path) / index.files[number]).read_bytes(), int(index.labels[number])


def reader(slices, scratch: Path, **options):
    files = [f"{path}/{index.files[number]}" for path, index, samples in slices for number in samples]
    labels = np.concatenate([index.labels[samples] for _, index, samples in slices]).tolist()

    def read():
        from nvidia.dali import fn, types

        encoded, label = fn.readers.file(files=files, labels=labels, name="reader", **options)
        return encoded, fn.cast(label, dtype=types.INT64)

    return read
