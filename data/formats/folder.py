"""One folder of images per class, read in place: train/CLASS/*.jpg, val/CLASS/*.jpg. Each split is one shard."""
import math
import os
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SUFFIX = ""
ANY_ORDER = True
UNREAD = "GIF, HEIC and AVIF"  # of the formats that data.prepare reads, those that DALI does not
VALIDATED = 100  # images, on which an accuracy has a 95 % interval of 20 points
UNREAD_SUFFIXES = {".gif", ".heic", ".heif", ".hif", ".avif"}
RARE_SUFFIXES = {".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2"}  # of formats that DALI reads in part
IMAGE_SUFFIXES = UNREAD_SUFFIXES | RARE_SUFFIXES | {".jpg", ".jpeg", ".jpe", ".png"}


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
    files = 0
    for name in class_names(path):
        files += len(image_files(Path(path) / name))
        if files >= most:
            break
    return files


def suggested_fraction(path) -> str:
    """Returns a fraction of images to validate on: 0.1, or more to have 100 images, but not more than 0.2."""
    images = max(1, count(path, 10 * VALIDATED))
    return f"{min(0.2, max(0.1, math.ceil(100 * VALIDATED / images) / 100)):g}"


def is_unread(encoded: bytes) -> bool:
    """Returns whether an image, of which the first 8 bytes are enough, is in one of the formats UNREAD."""
    return encoded.startswith(b"GIF8") or encoded[4:8] == b"ftyp"


def has_images(folder: Path) -> bool:
    """Returns whether a folder, or its subfolder train, contains folders of images."""
    return any(path.suffix.lower() in IMAGE_SUFFIXES for pattern in ("[!.]*/*", "train/[!.]*/*")
               for path in folder.glob(pattern))


def conversion(folder: Path, *flags: str) -> str:
    """Returns the commands that prepare a folder of images with these flags of data.prepare, and train on it."""
    output = shlex.quote(f"{folder}-prepared")
    prepare = ["uv run python -m data.prepare", f"--source={shlex.quote(str(folder))}", f"--output={output}", *flags]
    return f"run `{' '.join(prepare)}`, then `uv run train.py --data_dir={output}`"


class Listing:
    """The files of a split, relative to its folder, and their labels. Classes are in the order of their names."""

    def __init__(self, path):
        self.files = []
        labels = []
        for label, name in enumerate(class_names(path)):
            files = image_files(Path(path) / name)
            self.files += (str(file.relative_to(path)) for file in files)
            labels += [label] * len(files)
        self.labels = np.array(labels, np.int64)

    def __len__(self):
        return len(self.files)

    def __getstate__(self):
        """What is sent to the other workers: that of ImageNet has 54 MB otherwise."""
        return zlib.compress("\0".join(self.files).encode(errors="surrogateescape"), 1), np.bincount(self.labels)

    def __setstate__(self, state):
        files, counts = state
        self.files = zlib.decompress(files).decode(errors="surrogateescape").split("\0") if counts.sum() else []
        self.labels = np.repeat(np.arange(len(counts)), counts)

    def unread(self, path) -> Path | None:
        """Returns the first file, among those whose name says so, that DALI does not read. path: of the split."""
        for name in self.files:
            if os.path.splitext(name)[1].lower() in UNREAD_SUFFIXES:
                with open(Path(path, name), "rb") as file:
                    if is_unread(file.read(8)):
                        return Path(path, name)
        return None

    def of_rare_kinds(self, path) -> list[Path]:
        """Returns the first file of each suffix in RARE_SUFFIXES. path: of the split."""
        first = {name[name.rfind("."):].lower(): name for name in reversed(self.files)}
        return [Path(path, first[suffix]) for suffix in sorted(first.keys() & RARE_SUFFIXES)]


def read_index(path) -> Listing:
    return Listing(path)


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
