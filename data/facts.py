"""What a dataset is, in words, for data.prepare and train.py to print: its classes, its sizes, how it was read."""
import contextlib
from collections.abc import Collection
from itertools import chain
from pathlib import Path

import numpy as np

from common.errors import in_list, listed, shown
from data import duplicates
from data.class_folders import KNOWN, Listing, layout
from data.class_names import alike
from data.dataset import Dataset, Split, labels_checksum
from data.image_files import left_out_line
from data.images import shorter_side

SHOWN = 5  # names in a line
LISTED = 20  # classes in a line with the number of images of each
SAMPLED = 8  # images whose size is looked at


def of_dataset(dataset: Dataset, is_built_in: bool = False, compares: bool = True) -> list[str]:
    """Returns what is odd about a dataset, and how many images its classes have. Raises OSError.

    Of a dataset whose labels are not known, only what the names of its classes show is told.

    is_built_in: whether its images are known. compares: whether to look for equal images, some of which it then reads.
    """
    train, validation = dataset.class_counts
    lines = [*alike(dataset.classes), *of_folder(dataset)]
    for name, counts in (("training", train), ("validation", validation)):
        if counts is not None and (empty := [repr(dataset.classes[label]) for label in np.flatnonzero(counts == 0)]):
            lines.append(f"no {name} images in {'class' if len(empty) == 1 else 'classes'} {listed(empty, SHOWN)}")
    if is_built_in or train is None or validation is None:
        return lines
    return [*lines, *_of_sizes(dataset, train, validation), *(of_equal_images(dataset) if compares else ())]


def _of_sizes(dataset, train, validation) -> list[str]:
    """Returns the number of training and validation images of each class, and whether the latter are set aside."""
    labels, which = range(len(train)), " by class"
    if len(train) > LISTED:
        labels = np.argsort(train + validation, kind="stable")[:LISTED]
        which = f" of the smallest {LISTED} of {len(train)} classes"
    each = ", ".join(f"{in_list(dataset.classes[label])} {train[label]:,} + {validation[label]:,}" for label in labels)
    fraction = dataset.train.fraction
    return [*([f"{dataset.folder} has no validation images, so about {fraction:.3g} of each class is set aside "
               "(--validation_fraction), chosen by the names of the files"] if fraction.is_part else []),
            f"training + validation images{which}: {each}"]


def of_equal_images(dataset: Dataset) -> list[str]:
    """Returns which images a dataset holds more than once. dataset: as in data.duplicates. Raises OSError."""
    groups = duplicates.duplicates(dataset)
    twice = [group for group in groups if len({label for *_, label in group}) > 1]
    leaked = [group for group in groups if len({split for split, *_ in group}) > 1]
    warned = {id(group) for group in (*twice, *leaked)}
    plain = [group for group in groups if id(group) not in warned]
    told = (("identical images", plain), ("identical images with different labels", twice),
            ("identical images in both splits, so the validation accuracy is too high", leaked))
    return [f"{text} ({len(which)}): {'; '.join(duplicates.names(dataset, which))}" for text, which in told if which]


def of_folder(dataset: Dataset) -> list[str]:
    """Returns how a folder of images or a table was read, if this is one and this process read it."""
    if dataset.table:
        return [*dataset.notes]
    return of_listings(dataset.folder, [*dataset.train.entries, *dataset.validation.entries]) if (
        dataset.format == "folder" and dataset.train.indexes) else []


def of_listings(folder: Path, listings: Collection[Listing]) -> list[str]:
    """Returns how a folder of images was read: what the splits are, subfolders, and what was left out."""
    train, validation, unused = layout(folder)
    below = [file.rpartition("/")[0] for listing in listings for file in listing.files if file.count("/") > 1]
    left_out = [line for path, listing in zip((train, validation), listings, strict=False)
                for line in left_out_line(path, listing.left_out)]
    empty = [repr(name) for name in sorted({*chain(*(listing.folders for listing in listings))})
             if not any(listing.folders.get(name) for listing in listings)]
    said = [
        (validation and not {train, validation} <= {folder / name for name in KNOWN},
         f"{train} has the training images, and {validation} the validation images"),
        (empty, f"no classes, because they have no images: {listed(empty, SHOWN)}"),
        (unused, f"not used: {', '.join(map(str, unused))}"),
        (below, f"{len(below):,} images lie in subfolders of classes ({len({*below}):,}), such as "
                f"{shown(min(below, default=''))}; the outermost folder is the class")]
    return [*(text for is_said, text in said if is_said), *left_out]


def of_evaluation(dataset: Dataset, labels: str | None) -> str:
    """Returns which images of a dataset in files are evaluated. labels: labels_checksum of the run's training set."""
    split, folder = dataset.validation, dataset.folder
    if split.fraction.is_everything:
        return (f"all {split.samples:,} images in {split.paths[0]} are evaluated, because the run was trained on "
                "another folder")
    if split.fraction.is_nothing:
        return f"the {split.samples:,} validation images of {folder} are evaluated"
    said = f"{split.samples:,} images in {folder} are evaluated: those "
    if labels and labels != labels_checksum(dataset.train):
        return said + ("that their names set aside from training; the images in the folder have changed since the run "
                       "was trained")
    return said + f"that were set aside when the run was trained on the other {dataset.train.samples:,}"


def typical_side(split: Split) -> int:
    """Returns the shorter side of a typical image, in pixels, of a few that it reads. 0 if they cannot be read.

    Training itself tells of these.
    """
    samples = np.unique(np.linspace(0, split.samples - 1, SAMPLED).astype(np.int64))
    with contextlib.suppress(OSError, ValueError):
        return round(np.median([shorter_side(image) for image, _ in split.records(samples)]))
    return 0
