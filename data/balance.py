"""How many images of each class a dataset has, and whether it can be learned."""
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from common.errors import UserError
from data.class_folders import learnable, no_classes
from data.dataset import Dataset


def check_classes(folder, classes: Iterable[str]) -> None:
    """Raises UserError if there is a single class."""
    if len(found := [*islice(classes, 2)]) == 1:
        meant = no_classes(Path(folder)) if os.path.isdir(f"{folder}/{found[0]}") else ""
        raise UserError(f"{folder} has a single class, {found[0]!r}, so there is nothing to learn; it needs images of "
                        f"at least two classes, those of each in a folder that has the name of the class{meant}")


def check_dataset(dataset: Dataset) -> None:
    """Raises UserError if a dataset has a single class."""
    in_folders = dataset.format == "folder" and not dataset.table
    check_classes(dataset.folder, learnable(dataset.train.paths[0]) if in_folders else dataset.classes)


def train_counts(dataset: Dataset) -> np.ndarray:
    """Returns the number of training images of each class, int64 (classes,). Raises UserError if they are not known."""
    if (counts := dataset.class_counts[0]) is None:
        raise UserError(f"--class_weights: the labels of {dataset.folder} are not known before its images are read; "
                        "prepare it on a disk with data.prepare --source, or remove the flag")
    return counts
