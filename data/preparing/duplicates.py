"""Finds images that a dataset holds more than once, also under two labels or in both splits."""
import hashlib
from collections import defaultdict

import numpy as np

from data import checksums
from data.dataset import Dataset

SHOWN = 3  # pairs of names in a line


def duplicates(dataset: Dataset) -> list[list[tuple[str, int, int]]]:
    """Returns the groups of images with the same bytes: (split, sample, label) of each image.

    dataset: that data.prepare has just written, with checksums. Only images with equal checksums are read.
    """
    splits = {"train": dataset.train, "validation": dataset.validation}
    known = {name: np.concatenate([*map(checksums.of_images, split.paths)]) for name, split in splits.items()}
    values, counts = np.unique(np.concatenate([*known.values()]), return_counts=True)
    groups = defaultdict(list)
    for name, split in splits.items():
        samples = np.flatnonzero(np.isin(known[name], values[counts > 1]))
        records = split.records(samples) if len(samples) else ()
        for sample, (image, label) in zip(samples.tolist(), records, strict=True):
            groups[hashlib.sha256(image).digest()].append((name, sample, label))
    return [group for group in groups.values() if len(group) > 1]


def notes(dataset: Dataset) -> list[str]:
    """Returns what to tell the user about them: what is wrong with them, or that they are there."""
    groups = duplicates(dataset)
    twice = [group for group in groups if len({label for *_, label in group}) > 1]
    leaked = [group for group in groups if len({split for split, *_ in group}) > 1]
    warned = {id(group) for group in (*twice, *leaked)}
    plain = [group for group in groups if id(group) not in warned]
    told = (("note: identical images", plain), ("warning: identical images with different labels", twice),
            ("warning: identical images in both splits, so the validation accuracy is too high", leaked))
    return [f"{text} ({len(which)}): {'; '.join(_names(dataset, which[:SHOWN]))}" for text, which in told if which]


def _names(dataset, groups) -> list[str]:
    def name(split, sample, _):
        part = getattr(dataset, split)
        return part.source_name(sample) or part.name(sample)

    return [" = ".join(name(*image) for image in group[:SHOWN]) for group in groups]
