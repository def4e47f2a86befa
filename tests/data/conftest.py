"""The digits in every format."""
from pathlib import Path

import numpy as np
import pytest
from making import CUTS, write_class_folders, write_shards

from data.dataset import open_dataset


@pytest.fixture(scope="session")
def digit_records(digits) -> dict[str, list[tuple[bytes, int]]]:
    """split -> (JPEG, label) pairs of the built-in digits."""
    opened = open_dataset(digits)
    return {name: list(split.kind.records(split.paths[0], split.entries[0], np.arange(CUTS[name][-1])))
            for name, split in (("train", opened.train), ("validation", opened.validation))}


@pytest.fixture(scope="session")
def in_format(digit_records, tmp_path_factory):
    """A function from a format's name to a dataset of the digits in it."""
    made = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            (write_class_folders if name == "folder" else write_shards)(name, digit_records, made[name])
        return made[name]

    return make
