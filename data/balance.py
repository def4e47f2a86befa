"""What a dataset shows before a training: classes without images, the accuracy of always guessing one, tiny images."""
import contextlib
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from common.errors import UserError, in_list, listed
from data import checksums
from data.class_names import notes_on_names
from data.dataset import Dataset, Split, labels_checksum
from data.formats.folder import learnable, no_classes, remarks
from data.images import shorter_side

NOTABLE = 1.5  # times 1 / classes: a most frequent class with at least this share of the validation images is a note
SHOWN = 5  # names in a line
UNEVEN = 4  # times as many images in one class as in another, above which --class_weights is mentioned
LISTED = 20  # classes in a line with the number of images of each
SAMPLED = 8  # images whose size is looked at
ENLARGED = 3  # times the size of an image, from which training on it is a note
TINY = 48  # pixels up to which the CIFAR networks of the zoo suit an image
FEW = 10  # validation images of a class: with fewer, one image changes its accuracy by more than 10 points


def check_classes(folder, classes: Iterable[str]) -> None:
    """Raises UserError if there is a single class."""
    if len(found := [*islice(classes, 2)]) == 1:
        meant = no_classes(Path(folder)) if os.path.isdir(f"{folder}/{found[0]}") else ""
        raise UserError(f"{folder} has a single class, {found[0]!r}, so there is nothing to learn; it needs images of "
                        f"at least two classes, those of each in a folder that has the name of the class{meant}")


def check_dataset(dataset: Dataset) -> None:
    """Raises UserError if a dataset has a single class."""
    check_classes(dataset.folder, learnable(dataset.train.paths[0]) if dataset.format == "folder" else dataset.classes)


Counts = tuple[np.ndarray | None, np.ndarray | None]  # images of each class in training and validation; None: not known


def notes(dataset: Dataset, is_weighted: bool = False, counts: Counts | None = None) -> list[str]:
    """Returns what to tell the user about the classes of a dataset, and how a folder of images was read.

    It reads no image: labels are known for a folder of images, and where data.prepare stored them with the checksums.
    Of other datasets and of those in a bucket, only what their names show is told. is_weighted: whether --class_weights
    is given. counts: of class_counts, if they have been read.
    """
    train, validation = counts or class_counts(dataset)
    lines = [*notes_on_names(dataset.classes), *notes_on_folder(dataset)]
    if train is None or validation is None:
        return lines
    for name, counts in (("training", train), ("validation", validation)):
        if empty := [repr(dataset.classes[label]) for label in np.flatnonzero(counts == 0)]:
            lines.append(f"warning: no {name} images {_in_classes(empty)}")
    least = np.where(train, train, train.max()).argmin()
    if train.max() > UNEVEN * train[least] and not is_weighted:
        lines.append(f"note: {train.max()} training images of {dataset.classes[train.argmax()]!r} and {train[least]} "
                     f"of {dataset.classes[least]!r}; --class_weights=balanced gives each class the same weight")
    if (share := validation.max() / validation.sum()) >= NOTABLE / len(validation):
        lines.append(f"note: always guessing {dataset.classes[validation.argmax()]!r} is right on {share:.1%} of the "
                     "validation images")
    return lines


def notes_on_sizes(dataset: Dataset, counts: Counts | None = None) -> list[str]:
    """Returns the number of training and validation images of each class, and a warning if validation has few of some.

    It reads no image, and knows the same datasets as `notes`. counts: as in `notes`.
    """
    train, validation = counts or class_counts(dataset)
    if train is None or validation is None:
        return []
    labels, which = range(len(train)), " by class"
    if len(train) > LISTED:
        labels = np.argsort(train + validation, kind="stable")[:LISTED]
        which = f" of the smallest {LISTED} of {len(train)} classes"
    sizes = ", ".join(f"{in_list(dataset.classes[label])} {train[label]:,} + {validation[label]:,}" for label in labels)
    fraction = dataset.train.fraction
    lines = [f"note: {dataset.folder} has no validation images, so about {fraction:.3g} of each class is set aside "
             "(--validation_fraction), chosen by the names of the files"] if fraction else []
    lines.append(f"note: training + validation images{which}: {sizes}")
    if few := [f"{dataset.classes[label]!r} ({validation[label]})" for label in np.argsort(validation, kind="stable")
               if 0 < validation[label] < FEW]:
        lines.append(f"warning: fewer than {FEW} validation images {_in_classes(few)}, so what is measured for "
                     f"{'this class' if len(few) == 1 else 'these classes'} is uncertain")
    return lines


def notes_on_enlarging(dataset: Dataset, image_size: int) -> list[str]:
    """Returns a line if training enlarges the images ENLARGED times or more. It reads a few of them.

    Training itself tells of images that cannot be read. image_size: of the training, in pixels.
    """
    samples = np.unique(np.linspace(0, dataset.train.samples - 1, SAMPLED).astype(np.int64))
    side = 0
    with contextlib.suppress(OSError, ValueError):
        side = round(np.median([shorter_side(image) for image, _ in dataset.train.records(samples)]))
    if not 0 < ENLARGED * side <= image_size:
        return []
    network = "--model=resnet20 " if side <= TINY else ""
    return [f"note: the training images have about {side} pixels, and --image_size={image_size} enlarges them "
            f"{image_size / side:.2g} times; with {network}--image_size={side}, a step takes much less time"]


def _in_classes(names: list[str]) -> str:
    return f"in {'class' if len(names) == 1 else 'classes'} {listed(names, SHOWN)}"


def notes_on_folder(dataset: Dataset) -> list[str]:
    """Returns what to tell the user about how a folder of images was read, if this is one and this process read it."""
    return remarks(dataset.folder, [*dataset.train.entries, *dataset.validation.entries]) if (
        dataset.format == "folder" and dataset.train.indexes) else []


def train_counts(dataset: Dataset) -> np.ndarray:
    """Returns the number of training images of each class, int64 (classes,). Raises UserError if they are not known."""
    counts = _counts(dataset.train, len(dataset.classes), dataset.first_label)
    if counts is None:
        raise UserError(f"--class_weights: the labels of {dataset.folder} are not known before its images are read; "
                        "prepare it on a disk with data.prepare --source, or remove the flag")
    return counts


def note_on_evaluation(dataset: Dataset, labels: str | None) -> str:
    """Returns which images of a dataset in files are evaluated. labels: labels_checksum of the run's training set."""
    split, folder = dataset.validation, dataset.folder
    if split.fraction == 1:
        return (f"note: all {split.samples:,} images in {split.paths[0]} are evaluated, because the run was trained on "
                "another folder")
    if not split.fraction:
        return f"note: the {split.samples:,} validation images of {folder} are evaluated"
    said = f"note: {split.samples:,} images in {folder} are evaluated: those "
    if labels and labels != labels_checksum(dataset.train):
        return said + ("that their names set aside from training; the images in the folder have changed since the run "
                       "was trained")
    return said + f"that were set aside when the run was trained on the other {dataset.train.samples:,}"


def class_counts(dataset: Dataset) -> Counts:
    """Returns the number of images of each class in both splits, int64 (classes,). It reads the labels of all images.
    """
    train, validation = (_counts(split, len(dataset.classes), dataset.first_label)
                         for split in (dataset.train, dataset.validation))
    return train, validation


def _counts(split: Split, classes: int, first_label: int) -> np.ndarray | None:
    """Returns the number of images of each class, int64 (classes,), or None if the labels are not known."""
    labels = [entries.labels for entries in split.entries] if split.format == "folder" else [
        checksums.labels(path) for path in split.paths]
    if not labels or any(of_file is None for of_file in labels):
        return None
    return np.bincount(np.clip(np.concatenate(labels) - first_label, 0, classes - 1), minlength=classes)
