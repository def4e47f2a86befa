"""A prepared dataset: a folder of shards described by dataset.json. Uses plain Python and NumPy, not TensorFlow.

A folder without dataset.json is also a dataset if it has one folder of images per class, in train/ and val/ or without
them.
"""
import contextlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import stand_in, start_of
from data import checksums, class_folders, formats
from data.class_names import distinct
from data.image_files import DAMAGED
from data.images import Rejected, check
from data.set_aside import FRACTION, NOTHING, SetAside
from data.staging.remote import Missing, RemotePath, is_remote, located

IMAGENET_MEAN = (123.675, 116.28, 103.53)  # used if a folder's own are unknown
IMAGENET_STD = (58.395, 57.12, 57.375)
ORDERS = ("global", "file")  # of the samples; see data.order
REQUESTS = 32  # at a time, for sizes and indexes of objects


@dataclass(frozen=True)
class Window:
    """A folder on a node's disk that keeps the fetched blocks of a split. All workers of the node share it."""

    folder: Path
    size: int  # bytes that the blocks may take
    room: int  # bytes that a spool (data.staging.spool) may write before DALI needs them
    block: int  # maximum number of samples in a block
    seed: int | None  # random seed of the order of the blocks; None: each pass reads them in the order of the dataset
    is_shared: bool = False  # whether several workers of the node read from it
    is_kept: bool = False  # whether it stays for the next training
    group: int = 1  # number of blocks whose samples are shuffled together
    repeats: int = 1  # how often an epoch takes each of its samples


@dataclass(frozen=True)
class Split:
    """The shards of one split. Sample numbers run through the first file, then through the second, and so on."""

    format: str
    paths: tuple[Path, ...]
    file_samples: tuple[int, ...]  # number of samples in each file
    # The index of each file, or None before they are read.
    indexes: tuple | None = field(default=None, compare=False, repr=False)
    # The CRC-32 of the images of each file, uint32 (samples,); None for a file without them, and before they are read.
    checksums: tuple | None = field(default=None, compare=False, repr=False)
    order: str = ORDERS[0]  # one of ORDERS
    window: Window | None = None  # where fetched blocks are kept; None: the files are read where they are
    fraction: SetAside = NOTHING  # is_part: both splits are one folder

    @property
    def kind(self):
        """The format's module."""
        return formats.get(self.format)

    @property
    def any_order(self) -> bool:
        """Whether samples are read in any order. Data without files has none."""
        return not self.paths or self.order == "global"

    @property
    def is_spooled(self) -> bool:
        """Whether another process copies the samples in reading order for DALI (data.staging.spool).

        DALI itself cannot fetch them, or its reader of this format cannot follow the order.
        """
        return bool(self.paths) and (self.window is not None or (self.any_order and not self.kind.ANY_ORDER))

    @property
    def samples(self) -> int:
        return sum(self.file_samples)

    @cached_property
    def file_starts(self) -> np.ndarray:
        """The number of each file's first sample, followed by the number of samples; int64 (files + 1,)."""
        return np.concatenate([[0], np.cumsum(self.file_samples)]).astype(np.int64)

    def files_of(self, samples) -> np.ndarray:
        """Returns the number of the file that holds each sample."""
        return np.searchsorted(self.file_starts, samples, side="right") - 1

    @cached_property
    def entries(self) -> tuple:
        """The index of each file, as its format reads it. Raises OSError, ValueError."""
        return self.indexes or tuple(self.kind.read_index(path) for path in self.paths)

    @cached_property
    def stored_size(self) -> int:
        """The bytes of its records. Raises OSError, ValueError."""
        return sum(int(self.kind.stored_sizes(index).sum()) for index in self.entries)

    def with_indexes(self, classes: Sequence[str] = ()) -> "Split":
        """Returns the split with its indexes. Raises OSError, ValueError.

        If its files are objects in a bucket, also reads their sizes, tags and checksums. classes: names in label order,
        for a folder of images.
        """
        if self.indexes:
            return self
        if self.format == "folder":
            return replace(self, indexes=tuple(class_folders.Listing(path, classes) for path in self.paths))
        if not all(isinstance(path, RemotePath) for path in self.paths):
            return replace(self, indexes=self.entries)
        with ThreadPoolExecutor(REQUESTS) as pool:
            paths = tuple(pool.map(RemotePath.inspected, self.paths))
            return replace(self, paths=paths, indexes=tuple(pool.map(self.kind.read_index, paths)),
                           checksums=tuple(pool.map(checksums.of_images, paths)))

    def without(self, samples: np.ndarray, why: str) -> "Split":
        """Returns a folder of images without these. why: what they are. Raises UserError if none are left."""
        [listing] = self.entries
        kept = listing.without(samples, why)
        if not len(kept) and len(listing):
            raise UserError(f"--data_dir: {self.paths[0]} contains no images but {len(listing):,} {why}")
        return replace(self, file_samples=(len(kept),), indexes=(kept,))

    def moved(self, source: Path, target: Path) -> "Split":
        return replace(self, paths=tuple(target / path.relative_to(source) for path in self.paths))

    def conversion(self, *flags: str) -> str:
        """Returns what to do if DALI does not read a folder of images: commands that prepare it and use the result.

        flags: of data.prepare.
        """
        [path] = self.paths
        [listing] = self.indexes or (None,)
        if listing is not None and listing.table:
            return class_folders.conversion(listing.table, *flags, *listing.flags)
        folder, own = (path.parent, []) if self.fraction.is_nothing else (
            path, [f"--validation_fraction={self.fraction:g}"])
        then = {"then": "this command with --data_dir={}"} if self.fraction.is_everything else {}
        return class_folders.conversion(folder, *flags, *own, **then)

    def slices(self, samples: np.ndarray) -> list[tuple]:
        """Splits samples into slices that each lie in one file: (path, index, sample numbers within the file), ...

        If the format is read file by file, the sample numbers of a slice are also consecutive.
        """
        files = self.files_of(samples)
        cuts = np.diff(files, prepend=-1) != 0
        if not self.any_order:
            cuts |= np.diff(samples, prepend=-2) != 1
        starts = np.flatnonzero(cuts)
        return [(self.paths[file], self.entries[file], samples[start:end] - self.file_starts[file])
                for file, start, end in zip(files[starts], starts, np.append(starts, len(samples))[1:], strict=True)]

    def records(self, samples: np.ndarray) -> Iterator[tuple[bytes, int]]:
        """Yields the encoded image and the label of these samples."""
        for part in self.slices(samples):
            yield from self.kind.records(*part)

    def name(self, sample: int) -> str:
        """Returns the file and record of a sample, and the file that it was prepared from, for messages."""
        file = int(self.files_of(sample))
        path, name = self.paths[file], self.source_name(sample)
        if self.format == "folder":
            return f"{path}/{name}"
        place = f"{path}, record {sample - self.file_starts[file]}"
        return f"{name} in {place}" if name else place

    def names(self) -> list[str]:
        """Returns for each sample the file that it was prepared from, or if that is not known, its file and record.

        Objects in a bucket are not read for that: a request for each record takes longer than an evaluation.
        """
        if self.format == "folder":
            return [f"{path}/{name}" for path, index in zip(self.paths, self.entries, strict=True)
                    for name in index.files]
        found = []
        for path, index, count in zip(self.paths, self.entries, self.file_samples, strict=True):
            stored = checksums.source_names(path) or [
                None if is_remote(path) else self.kind.source_name(path, index, record) for record in range(count)]
            found += [name or f"{path}, record {record}" for record, name in enumerate(stored)]
        return found

    def source_name(self, sample: int) -> str | None:
        """Returns the name of the file that a sample was prepared from, or None if it is not known."""
        file = int(self.files_of(sample))
        path, record = self.paths[file], int(sample - self.file_starts[file])
        try:
            return checksums.source_name(path, record) or self.kind.source_name(path, self.entries[file], record)
        except (OSError, ValueError):
            return None


@dataclass(frozen=True)
class Dataset:
    """The content of dataset.json, checked against the files that it names."""

    folder: Path
    format: str
    classes: tuple[str, ...]
    train: Split
    validation: Split
    mean: tuple[float, float, float]  # RGB, 0 to 255
    std: tuple[float, float, float]
    first_label: int = 0  # the smallest label on disk; the pipeline subtracts it, so that its labels start at 0
    notes: tuple[str, ...] = ()  # how a table was read, in words

    @property
    def is_synthetic(self) -> bool:
        """Whether the images are random numbers, which lie in no file."""
        return not self.validation.paths

    @property
    def table(self) -> Path | None:
        """The table that names the images, if they are read in place."""
        return next((listing.table for listing in self.validation.indexes or () if self.format == "folder"), None)

    @property
    def damaged(self) -> list[str]:
        """The images that a training leaves out of its folder, because DALI cannot decode them."""
        return [f"{path}/{name}" for split in (self.train, self.validation) if split.format == "folder"
                for path, listing in zip(split.paths, split.entries, strict=True)
                for name in listing.left_out.get(DAMAGED, ())]

    @cached_property
    def class_counts(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The number of images of each class in training and validation, int64 (classes,); None if it is not known.

        The labels are known for a folder of images, and where data.prepare stored them on a disk with the checksums.
        """
        return tuple(self._counts(split) for split in (self.train, self.validation))

    def _counts(self, split: Split) -> np.ndarray | None:
        labels = [entries.labels for entries in split.entries] if split.format == "folder" else [
            checksums.labels(path) for path in split.paths]
        if not labels or any(of_file is None for of_file in labels):
            return None
        classes = len(self.classes)
        return np.bincount(np.clip(np.concatenate(labels) - self.first_label, 0, classes - 1), minlength=classes)

    @cached_property
    def validation_content(self) -> dict[str, str]:
        """Digests by which two validation sets can be compared, wherever they lie and in whatever order.

        class_names: digest of the names of the classes.
        images: digest of the CRC-32 and label of each image, if data.prepare stored them on a disk.
        files, sizes: digests of the names and of the sizes of the images, for a folder of images.
        """
        split, known = self.validation, {"class_names": list(self.classes)}
        if self.format == "folder":
            known["files"] = sorted(file for listing in split.entries for file in listing.files)
            with contextlib.suppress(OSError):
                known["sizes"] = sorted(pair for path, listing in zip(split.paths, split.entries, strict=True)
                                        for pair in listing.sizes(path))
        elif not is_remote(self.folder):
            with contextlib.suppress(OSError, ValueError):
                known["images"] = sorted(line[:2] for path in split.paths for line in checksums.lines(path))
        return {name: f"{zlib.crc32(json.dumps(content).encode()):08x}" for name, content in known.items()}

    def with_indexes(self) -> "Dataset":
        """Returns the dataset with the index of each file, which it reads and checks if it has none. Raises UserError.
        """
        if self.validation.indexes or self.is_synthetic:
            return self
        return open_dataset(self.folder, fraction=self.train.fraction)

    def divided(self, fraction: SetAside) -> "Dataset":
        """Returns a folder of classes of which everything was set aside, with another fraction."""
        [listing] = self.validation.entries
        splits = {name: replace(getattr(self, name), file_samples=(len(part),), indexes=(part,), fraction=fraction)
                  for name, part in zip(("train", "validation"), listing.divided(fraction), strict=True)}
        return replace(self, **splits)

    def in_order(self, order: str) -> "Dataset":
        """Returns the dataset to be read in one of ORDERS. Raises UserError if "file" makes no difference."""
        if order == "file" and (self.is_synthetic or self.train.kind.ANY_ORDER):
            raise UserError("--order=file is for LMDB and RecordIO, which DALI reads file by file, and the format of "
                            f"{self.folder} is {self.format}; remove the flag")
        return replace(self, train=replace(self.train, order=order), validation=replace(self.validation, order=order))

    def in_window(self, window: Window) -> "Dataset":
        """Returns the dataset to be read from a window, which the splits share by their sizes."""
        sizes = {"train": self.train.stored_size, "validation": self.validation.stored_size}
        train, validation = (
            replace(window, folder=window.folder / name, size=window.size * size // sum(sizes.values()))
            for name, size in sizes.items())
        return replace(self, train=replace(self.train, window=train),
                       validation=replace(self.validation, window=replace(validation, seed=None, repeats=1)))

    def moved_to(self, folder: Path) -> "Dataset":
        """Returns the dataset for a copy of its files in another folder."""
        if folder == self.folder:
            return self
        train, validation = (split.moved(self.folder, folder) for split in (self.train, self.validation))
        return replace(self, folder=folder, train=train, validation=validation)


def open_dataset(folder, check_files: bool = True, fraction: float = FRACTION) -> Dataset:
    """Reads FOLDER/dataset.json and checks its counts against its files. Raises UserError.

    check_files: whether the files have to be there; their indexes are read, too. Without it, the number of samples in a
    folder of images without dataset.json is 0.
    fraction: of each class to set aside for validation, if it is a folder of classes without validation images. 1: all
    images are for validation, and none for training, which a prepared dataset need not have either.
    """
    folder, fraction = located(folder), SetAside(fraction)
    if not is_remote(folder) and not folder.is_dir():
        raise UserError(f"--data_dir: {_no_folder(folder)}")
    if not is_remote(folder) and not (folder / "dataset.json").exists() and (
            dataset := _class_folders(folder, check_files, fraction)):
        return dataset
    described = _described(folder)
    try:
        dataset = Dataset(
            folder, described["format"], tuple(described["classes"]), _split(folder, described, "train"),
            _split(folder, described, "validation"), tuple(map(float, described["image"]["mean"])),
            tuple(map(float, described["image"]["std"])), int(described.get("first_label", 0)))
        claimed = {name: int(described[name]["samples"]) for name in ("train", "validation")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder}/dataset.json is malformed: {type(error).__name__} {error}") from None
    _check_words(dataset, described["classes"])
    dataset = replace(dataset, classes=distinct(dataset.classes, f"{folder}/dataset.json"))
    if not check_files:
        return dataset
    if fraction.is_everything and not dataset.train.paths:
        dataset = replace(dataset, train=replace(dataset.train, fraction=fraction))
    for name, samples in claimed.items():
        dataset = replace(dataset, **{name: _checked(dataset, name, samples)})
    if dataset.format == "folder":
        check_class_folders(dataset.folder, dataset.classes, (dataset.train, dataset.validation))
    return dataset


def _no_folder(path: Path) -> str:
    """Returns what to say about a path that is no folder."""
    if not path.is_file():
        return f"there is no folder {path}; create a dataset with data.prepare, or use the built-in `digits`"
    is_image = class_folders.kind(path.parent, path.name)
    return f"{path} is a file; " + (f"for its class, give --mode=predict --image={path}" if is_image else
                                    f"for a table of files and labels, {class_folders.conversion(path)}")


def _described(folder) -> dict:
    """Returns the content of dataset.json. Raises UserError, which says what a folder without it may be meant as."""
    try:
        return json.loads((folder / "dataset.json").read_text())
    except Missing as error:
        raise UserError(f"--data_dir: {error}; data.prepare writes it") from None
    except FileNotFoundError:
        if whole := class_folders.whole(folder):
            raise UserError(f"--data_dir: {folder} is one of the two splits in {whole}; "
                            f"give --data_dir={whole}") from None
        if validation := class_folders.lone_validation(folder):
            raise UserError(f"--data_dir: {folder} contains {validation.name}/ but no train/") from None
        raise UserError(f"--data_dir: {folder} contains neither dataset.json (data.prepare writes it) nor one folder "
                        "of images per class, in train/ and val/ or without them"
                        + class_folders.no_classes(folder)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder}/dataset.json cannot be read: {error}") from None


def describe(dataset: Dataset) -> dict:
    """Returns the content of dataset.json for a dataset."""
    def split(part):
        files = zip(part.paths, part.file_samples, strict=True)
        return {"samples": part.samples,
                "files": [{"path": str(path.relative_to(dataset.folder)), "samples": count} for path, count in files]}

    described = {"format": dataset.format, "classes": list(dataset.classes), "train": split(dataset.train),
                 "validation": split(dataset.validation),
                 "image": {"mean": list(dataset.mean), "std": list(dataset.std)}}
    return described | ({"first_label": dataset.first_label} if dataset.first_label else {})


def _split(folder, described, name):
    files = described[name]["files"]
    return Split(described["format"], tuple(folder / file["path"] for file in files),
                 tuple(int(file["samples"]) for file in files))


def labels_checksum(split: Split) -> str:
    """Returns a checksum of the names and labels of a split's images in their order, or "" if they are not known."""
    try:
        lines = [file for index in split.entries for file in index.files] if split.format == "folder" else [
            " ".join(line[1:]) for path in split.paths if not is_remote(path) for line in checksums.lines(path)]
    except (OSError, ValueError):
        return ""
    joined = "\n".join(lines).encode(errors="surrogateescape")
    return f"{zlib.crc32(joined):08x}" if lines else ""


def _class_folders(folder, check_files, fraction: SetAside) -> Dataset | None:
    """Opens a dataset of one folder of images per class. Returns None if the folder has another layout."""
    try:
        train, validation, _ = class_folders.layout(folder)
        lone = None if validation else class_folders.lone_validation(folder)
        if validation:
            fraction = NOTHING
        elif lone and fraction.is_everything:
            train = lone
        elif lone or (class_folders.whole(folder) and not fraction.is_everything) or (
                not class_folders.has_classes(train)):
            return None
        paths = train, validation or train
        classes = _names_in(train)
        listings = _listings(paths, classes, check_files, fraction)
    except OSError as error:
        raise UserError(f"--data_dir: {error}") from None
    splits = [Split("folder", (path,), (len(listing),), (listing,) if check_files else None, fraction=fraction)
              for path, listing in zip(paths, listings, strict=True)]
    check_class_folders(folder, classes, splits)
    if check_files:
        classes = class_folders.with_images(classes, listings)
    return Dataset(folder, "folder", classes, *splits, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _listings(paths, classes, check_files, fraction: SetAside) -> tuple:
    """Returns the images of each split, or empty tuples without `check_files`. Raises UserError, OSError."""
    if check_files and not fraction.is_nothing:
        listings = class_folders.Listing(paths[0], classes).divided(fraction)
    else:
        listings = tuple(class_folders.Listing(path, classes) if check_files else () for path in paths)
    first = 1 if fraction.is_everything else 0  # split that needs images: training, or validation alone
    for path, listing in zip(paths[first:], listings[first:], strict=True):
        if not (len(listing) if check_files else class_folders.class_names(path)):
            raise UserError(f"--data_dir: {class_folders.NO_IMAGES.format(path)}")
    return listings


def _names_in(path) -> tuple[str, ...]:
    """Returns the classes of the folders in the folder of a split. Raises UserError."""
    return distinct(class_folders.class_names(path), path)


def check_class_folders(folder, classes: Iterable[str], splits: Iterable[Split]) -> None:
    """Raises UserError if the splits of a folder of images have other classes than these, or a file is not for DALI."""
    for split in splits:
        if differing := split.fraction.is_nothing and {*classes} ^ {*_names_in(split.paths[0])}:
            raise UserError(f"{folder}: class {min(differing)!r} must have a folder in each split; create the "
                            "missing folder (it may be empty)")
        check_images(split)


def check_images(split: Split) -> None:
    """Raises UserError if DALI does not read an image of a folder that is read in place."""
    for path, listing in zip(split.paths, split.indexes or (), strict=False):
        if problem := listing.unread(path):
            raise UserError(f"{problem}; {split.conversion('--format=tfrecord')}")
        for file in listing.of_rare_kinds(path):  # one of each: sets have images of one kind
            try:
                check(file.read_bytes())
            except Rejected as error:
                raise UserError(f"--data_dir: {file}: {error}") from None


def _check_words(dataset, classes):
    wrong = None
    if not isinstance(dataset.format, str) or dataset.format not in formats.FORMATS:
        wrong = f"format '{dataset.format}' is not one of {', '.join(formats.FORMATS)}"
    elif not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        wrong = "classes must be a list of at least one name"
    elif not all(len(three) == 3 and all(map(math.isfinite, three)) for three in (dataset.mean, dataset.std)):
        wrong = "image.mean and image.std must be three finite numbers each"
    elif min(dataset.std) <= 0:
        wrong = "the numbers in image.std must be positive"
    if wrong:
        raise UserError(f"{dataset.folder}/dataset.json: {wrong}")


def _checked(dataset, name, samples) -> Split:
    """Returns a split with its indexes after the cheap checks: counts agree, and each index fits its file.

    Damaged records show only when they are read.
    """
    folder, split = dataset.folder, getattr(dataset, name)
    if not (split.samples or split.fraction.is_everything):
        raise UserError(f"{folder}/dataset.json: the {name} split is empty"
                        + ", so it is only for --mode=evaluate" * (name == "train"))
    if split.samples != samples:
        raise UserError(f"{folder}/dataset.json: the {name} split lists {samples} samples, but its files add up to "
                        f"{split.samples}; prepare the dataset again")
    try:
        split = split.with_indexes(dataset.classes)
    except (OSError, ValueError) as error:
        for path in (path for path in split.paths if isinstance(path, Path) and path.is_file()):
            if words := stand_in(start_of(path)):
                raise UserError(f"{path} is {words}") from None
        raise UserError(f"{folder}: {error}; prepare the dataset again") from None
    for path, count, index in zip(split.paths, split.file_samples, split.entries, strict=True):
        if len(index) != count:
            raise UserError(f"{folder}/dataset.json: {path.name} should contain {count} samples, but its index lists "
                            f"{len(index)}; prepare the dataset again")
    return split
