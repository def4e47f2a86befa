"""Makers of datasets: the digits in every format."""
import itertools
import json

import numpy as np

from data import formats
from data.dataset import Dataset, Split, describe

CUTS = {"train": (0, 500, 900, 1437), "validation": (0, 353)}  # three training files; 353 is a prime number


def write_shards(name, records, folder, cuts=CUTS):
    kind, splits = formats.get(name), {}
    for split, limits in cuts.items():
        paths = []
        for number, (start, end) in enumerate(itertools.pairwise(limits)):
            paths.append(folder / f"{split} {number}{kind.SUFFIX}")  # a name with a space
            kind.write(paths[-1], records[split][start:end])
        splits[split] = Split(name, tuple(paths), tuple(np.diff(limits).tolist()))
    dataset = Dataset(folder, name, tuple("0123456789"), **splits, mean=(80.0,) * 3, std=(80.0,) * 3)
    (folder / "dataset.json").write_text(json.dumps(describe(dataset)))


def write_class_folders(name, records, folder):
    for split, folder_name in (("train", "train"), ("validation", "val")):
        for number, (image, label) in enumerate(records[split][:CUTS[split][-1]]):
            path = folder / folder_name / f"class {label}" / f"{number:04} ü.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image)


def record(split, sample):
    """(encoded image, label) of one sample."""
    [(path, index, numbers)] = split.slices(np.array([sample]))
    return next(split.kind.records(path, index, numbers))
