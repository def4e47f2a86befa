"""A folder with one folder of images per class: train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg alone."""
import contextlib
import copy
import itertools
import os
import pickle
import shlex
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common.errors import shown
from data.class_names import normal
from data.image_files import RARE_SUFFIXES, THREADS, UNREAD_SUFFIXES, entries, images, kind
from data.set_aside import SetAside, set_aside

NO_IMAGES = "{} contains no images in class folders"
UNREAD = "GIF, HEIC and AVIF"  # of the formats that data.prepare reads, those that DALI does not
OPENED = 50_000  # files of a folder, at most, whose first bytes are read at the start
TRAIN_WORDS = "train", "training"  # names of folders, best first, in any case
VALIDATION_WORDS = "val", "valid", "validation", "test", "testing"
KNOWN = {"train", "val", "validation"}  # these names mean a split whatever is in it
TABLES = (".csv", ".tsv")  # suffixes of tables of files and labels
TABLE = "if a table names the classes, prepare the images with `data.prepare --source={} --output=FOLDER`"


def class_names(path) -> list[str]:
    """Returns the classes of a split: the sorted names of its folders, without those that `walk` leaves out."""
    return [name for name, folder in entries(path)[0] if folder]


def layout(folder: Path) -> tuple[Path, Path | None, list[Path]]:
    """Finds the splits by the names of folders: in a folder, or in the one folder in it that holds both.

    Returns where the class folders of training and of validation are (None if there are none), and folders with a name
    for a split that are not used. Raises OSError.
    """
    if found := _splits(folder):
        return found
    inside = [found for name in class_names(folder) if not _holds_images(folder / name)
              and (found := _splits(folder / name)) and found[1]]
    return inside[0] if len(inside) == 1 else (folder, None, [])


def _splits(folder) -> tuple[Path, Path | None, list[Path]] | None:
    """Returns what `layout` does for a folder, or None if the folders in it are classes.

    A class may be called train or test, too. So a name counts if it is in KNOWN, or has class folders.
    """
    names = class_names(folder)
    like = [[folder / name for word in words for name in reversed(names) if name.lower() == word]  # train before Train
            for words in (TRAIN_WORDS, VALIDATION_WORDS)]
    train, validation = (next((path for path in paths if path.name in KNOWN or has_classes(path)), None)
                         for paths in like)
    has_others = len(names) > sum(map(len, like))
    if not train or not (validation or not has_others or (train.name in KNOWN and has_classes(train))):
        return None
    return train, validation, [path for paths in like for path in paths if path not in (train, validation)]


def has_classes(path) -> bool:
    """Whether a folder contains folders of images."""
    return any(images(path / name)[0] for name in class_names(path))


def learnable(path) -> Iterator[str]:
    """Yields the classes of a split, without folders that have no images."""
    return (name for name in class_names(path) if images(f"{path}/{name}")[0])


def _holds_images(path) -> bool:
    return any(not folder and kind(path, name) for name, folder in entries(path)[0])


def whole(folder: Path) -> Path | None:
    """Returns the folder that contains this one as one of its two splits, or None if there is none."""
    with contextlib.suppress(OSError):
        if (found := _splits(folder.parent)) and found[1] and folder in found:
            return folder.parent
    return None


def count(path, most: int) -> int:
    """Returns the number of images in class folders. It stops after the class with which it reaches `most`."""
    files = 0
    for name in class_names(path):
        files += len(images(f"{path}/{name}")[0])
        if files >= most:
            break
    return files


def lone_validation(folder: Path) -> Path | None:
    """Returns the folder of validation images in a folder that has nothing else, such as test/, or None."""
    names = class_names(folder)
    found = [folder / name for word in VALIDATION_WORDS for name in names if name.lower() == word]
    return next((path for path in found if len(found) == len(names) and has_classes(path)), None)


def conversion(folder: Path, *flags: str, then: str = "`uv run train.py --data_dir={}`") -> str:
    """Returns the commands that prepare a folder of images with these flags of data.prepare, and use the result."""
    output = shlex.quote(f"{folder}-prepared")
    prepare = ["uv run python -m data.prepare", f"--source={shlex.quote(str(folder))}", f"--output={output}", *flags]
    return f"run `{' '.join(prepare)}`, then {then.format(output)}"


def no_classes(folder: Path) -> str:
    """Returns what a folder may be meant as that has no folders of classes, as the end of a message, or ""."""
    with contextlib.suppress(OSError):
        tables = [path for place in (folder, folder.parent) for path in sorted(place.iterdir())
                  if path.name.lower().removesuffix(".gz").endswith(TABLES)]
        labels = f"; {TABLE.format(shlex.quote(str(tables[0])))}" if tables else ""
        if _holds_images(folder):
            return (f"; it has images that are in no folder of a class, which a trained model classifies: "
                    f"--mode=predict --image={shlex.quote(str(folder))}{labels}")
        return labels
    return ""


class Listing:
    """The images of a split and their labels.

    files: paths of the images, relative to the folder of the split.
    labels: int64 (images,).
    kinds: suffix (`kind`) of each image that is neither JPEG nor PNG, by its path.
    folders: name of each folder, in normal form -> whether it has images.
    left_out: see `images`.
    table: that names the images, or None. flags: of data.prepare, with which it reads the table alike.
    """

    table: Path | None = None
    flags: tuple[str, ...] = ()

    def __init__(self, path, classes: Sequence[str] | None = None):
        """Raises OSError. classes: names in label order, in normal form. Default: the sorted names of the folders.

        An image in the folder of another class gets the label -1.
        """
        folders = class_names(path)
        known = {name: label for label, name in enumerate(classes or map(normal, folders))}
        labels = {folder: known.get(normal(folder), -1) for folder in folders}
        kinds, self.left_out = images(path)
        self.left_out["images in no class folder"] = [file for file in kinds if "/" not in file]
        self.files = [file for file in kinds if "/" in file]
        self.kinds = _rare_or_unread({file: kinds[file] for file in self.files})
        found = [file.partition("/")[0] for file in self.files]
        self.labels = np.array([labels[folder] for folder in found], np.int64)
        self.folders = dict.fromkeys(map(normal, folders), False) | dict.fromkeys(map(normal, found), True)

    @classmethod
    def of_table(cls, table: Path, files: Sequence[str], labels: np.ndarray, flags: tuple[str, ...] = ()) -> "Listing":
        """Returns the images of a table. files: relative to its folder. labels: int64 (images,)."""
        listing = cls.__new__(cls)
        listing.table, listing.files, listing.labels, listing.flags = table, [*files], labels, flags
        listing.kinds = _rare_or_unread({file: kind(table.parent, file) for file in files})
        listing.folders, listing.left_out = {}, {}
        return listing

    def __len__(self):
        return len(self.files)

    def divided(self, fraction: SetAside) -> tuple["Listing", "Listing"]:
        """Returns the images for training and those for validation (`set_aside`). The first lists what is left out."""
        chosen = set_aside(self.files, self.labels, fraction)
        train, validation = (self._chosen(numbers) for numbers in (np.flatnonzero(~chosen), np.flatnonzero(chosen)))
        validation.left_out = {}
        return train, validation

    def without(self, numbers: np.ndarray, why: str) -> "Listing":
        """Returns the other images. Those of these numbers are left out. why: what they are."""
        part = self._chosen(np.setdiff1d(np.arange(len(self)), numbers))
        part.left_out = self.left_out | {why: [self.files[number] for number in numbers]}
        return part

    def _chosen(self, numbers) -> "Listing":
        part = copy.copy(self)
        part.files = [self.files[number] for number in numbers]
        part.kinds = {file: self.kinds[file] for file in part.files if file in self.kinds}
        part.labels = self.labels[numbers]
        return part

    def sizes(self, path) -> list[tuple[str, int]]:
        """Returns pairs of an image and its size in bytes. Raises OSError. path: of the split."""
        with ThreadPoolExecutor(THREADS) as pool:
            return [*zip(self.files, pool.map(lambda file: os.stat(f"{path}/{file}").st_size, self.files), strict=True)]

    def __getstate__(self):
        """Compresses what rank 0 sends to the other workers: 54 MB for ImageNet."""
        return zlib.compress(pickle.dumps(vars(self)), 1)

    def __setstate__(self, state):
        vars(self).update(pickle.loads(zlib.decompress(state)))

    def unread(self, path) -> str | None:
        """Returns what to say about the files that DALI does not read, or None if it reads all.

        Their first bytes tell: phones name HEIC .jpg, too. Of many files, these are read of OPENED, evenly spaced, and
        of those with another suffix than .jpg and .png. path: of the split.
        """
        if odd := next((name for name in self.files if shown(name) != name), None):
            return f"{path}/{shown(odd)}: DALI does not read names that are not UTF-8"
        opened = [*dict.fromkeys([*self.files[::len(self.files) // OPENED + 1], *self.kinds])]
        with ThreadPoolExecutor(THREADS) as pool:
            unread = [*itertools.compress(opened, pool.map(_is_unread, (f"{path}/{name}" for name in opened)))]
        more = f" ({len(unread)} such files)" if len(unread) > 1 else ""
        return f"{path}/{unread[0]}{more}: DALI does not read {UNREAD}, whatever their names" if unread else None

    def of_rare_kinds(self, path) -> list[Path]:
        """Returns the first file of each kind in RARE_SUFFIXES. path: of the split."""
        first = {suffix: name for name, suffix in reversed(self.kinds.items())}
        return [Path(path, first[suffix]) for suffix in sorted(first.keys() & RARE_SUFFIXES)]


def with_images(classes: Sequence[str], listings: Sequence[Listing]) -> tuple[str, ...]:
    """Returns the classes that have images in one of the listings, whose labels are numbered anew."""
    present = np.unique(np.concatenate([listing.labels for listing in listings]))
    for listing in listings:
        listing.labels = np.searchsorted(present, listing.labels)
    return tuple(classes[label] for label in present)


def _rare_or_unread(kinds: dict[str, str]) -> dict[str, str]:
    """Returns the images that DALI reads in part or not at all. kinds: suffix of each image, by its path."""
    return {file: suffix for file, suffix in kinds.items() if suffix in UNREAD_SUFFIXES | RARE_SUFFIXES}


def _is_unread(path: str) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:  # an error shows when the image is read
        return (start := file.read(8)).startswith(b"GIF8") or start[4:] == b"ftyp"  # that of HEIC and AVIF
    return False
