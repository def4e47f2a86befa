"""One folder of images per class, read in place: train/CLASS/*.jpg, val/CLASS/*.jpg. Each split is one shard."""
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SUFFIX = ""
ANY_ORDER = True


def index_path(path) -> None:
    return None


def class_names(path) -> list[str]:
    """Returns the classes of a split: the sorted names of its folders, except hidden ones."""
    with os.scandir(path) as entries:  # knows what is a folder without a call for each
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def image_files(folder) -> list[Path]:
    """Returns the sorted files of a class, with those in its subfolders, except hidden ones."""
    return sorted(path for path in Path(folder).rglob("*") if path.is_file() and not path.name.startswith("."))


def count(path, most: int) -> int:
    """Returns the number of files in class folders. It stops after the class with which it reaches `most`."""
    found = 0
    for name in class_names(path):
        found += len(image_files(Path(path) / name))
        if found >= most:
            break
    return found


class Listing:
    """The files of a split, relative to its folder, and their labels. Classes are in the order of their names."""

    def __init__(self, path):
        self.files, labels = [], []
        for label, name in enumerate(class_names(path)):
            files = image_files(Path(path) / name)
            self.files += (str(file.relative_to(path)) for file in files)
            labels += [label] * len(files)
        self.labels = np.array(labels, np.int64)

    def __len__(self):
        return len(self.files)


def read_index(path) -> Listing:
    return Listing(path)


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
