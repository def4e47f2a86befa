"""A prepared dataset: a folder of shards described by dataset.json. Plain Python and NumPy, no TensorFlow."""
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data import tfrecord

FORMATS = ("tfrecord",)


class DatasetError(Exception):
    """A dataset cannot be used; the message says what is wrong with it and what to do."""


@dataclass(frozen=True)
class Split:
    """The shards of one split. Samples are numbered through: those of the first file, then those of the second, ..."""

    paths: tuple[Path, ...]
    file_samples: tuple[int, ...]

    @property
    def samples(self) -> int:
        return sum(self.file_samples)

    @cached_property
    def file_starts(self) -> np.ndarray:
        """The number of each file's first sample, and after the last the number of samples; int64 (files + 1,)."""
        return np.concatenate([[0], np.cumsum(self.file_samples)]).astype(np.int64)

    @cached_property
    def index(self) -> np.ndarray:
        """The (offset, size) of each sample within its file, int64 (samples, 2)."""
        return np.concatenate([tfrecord.read_index(tfrecord.index_path(path)) for path in self.paths])


@dataclass(frozen=True)
class Dataset:
    """What dataset.json says, checked against the files it names."""

    folder: Path
    format: str
    classes: tuple[str, ...]
    train: Split
    validation: Split
    mean: tuple[float, float, float]  # RGB, 0 to 255
    std: tuple[float, float, float]


def open_dataset(folder) -> Dataset:
    """Reads FOLDER/dataset.json and checks its counts against its files. Raises DatasetError."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DatasetError(f"--data_dir: there is no folder {folder}; data.prepare makes one, `digits` is built in")
    try:
        described = json.loads((folder / "dataset.json").read_text())
    except FileNotFoundError:
        raise DatasetError(f"--data_dir: {folder} holds no dataset.json; data.prepare writes it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{folder}/dataset.json cannot be read: {error}") from None
    try:
        dataset = Dataset(
            folder, described["format"], tuple(described["classes"]), _split(folder, described["train"]),
            _split(folder, described["validation"]), tuple(map(float, described["image"]["mean"])),
            tuple(map(float, described["image"]["std"])))
        claimed = {name: int(described[name]["samples"]) for name in ("train", "validation")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DatasetError(f"{folder}/dataset.json is malformed: {type(error).__name__} {error}") from None
    _check_words(dataset, described["classes"])
    for name, samples in claimed.items():
        _check(folder, name, samples, getattr(dataset, name))
    return dataset


def describe(dataset: Dataset) -> dict:
    """dataset.json's content for a dataset."""
    def split(part):
        files = zip(part.paths, part.file_samples, strict=True)
        return {"samples": part.samples,
                "files": [{"path": str(path.relative_to(dataset.folder)), "samples": count} for path, count in files]}

    return {"format": dataset.format, "classes": list(dataset.classes), "train": split(dataset.train),
            "validation": split(dataset.validation), "image": {"mean": list(dataset.mean), "std": list(dataset.std)}}


def _split(folder, described):
    files = described["files"]
    return Split(tuple(folder / file["path"] for file in files), tuple(int(file["samples"]) for file in files))


def _check_words(dataset, classes):
    wrong = None
    if dataset.format not in FORMATS:
        wrong = f"format '{dataset.format}' is not one of {', '.join(FORMATS)}"
    elif not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        wrong = "classes is not a list of names"
    elif not all(len(three) == 3 and all(map(math.isfinite, three)) for three in (dataset.mean, dataset.std)):
        wrong = "mean and std of image are not three numbers each"
    elif min(dataset.std) <= 0:
        wrong = "std of image has to be above zero"
    if wrong:
        raise DatasetError(f"{dataset.folder}/dataset.json: {wrong}")


def _check(folder, name, samples, split):
    """The cheap checks: counts agree, and each index fits its file. A damaged record shows only when it is read."""
    if not split.samples:
        raise DatasetError(f"{folder}/dataset.json: the {name} split is empty")
    if split.samples != samples:
        raise DatasetError(f"{folder}/dataset.json: {name} claims {samples} samples, its files add up to "
                           f"{split.samples}; prepare the dataset again")
    for path, count in zip(split.paths, split.file_samples, strict=True):
        try:
            size, index = path.stat().st_size, tfrecord.read_index(tfrecord.index_path(path))
        except (OSError, ValueError) as error:
            raise DatasetError(f"{folder}: {error}; prepare the dataset again") from None
        if len(index) != count:
            raise DatasetError(f"{folder}/dataset.json: {path.name} should hold {count} samples, its index names "
                               f"{len(index)}; prepare the dataset again")
        if count and (index[:, 0].min() < 0 or index[:, 1].min() <= tfrecord.FRAMING):
            raise DatasetError(f"{tfrecord.index_path(path)}: not an index of TFRecord; prepare the dataset again")
        if count and index.sum(axis=1).max() > size:
            raise DatasetError(f"{path}: the file has {size} bytes, its index points beyond; it is truncated: "
                               "prepare the dataset again")
