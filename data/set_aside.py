"""Which images of a folder without validation images are set aside for validation."""
import hashlib
import os
from collections.abc import Sequence

import numpy as np


class SetAside(float):
    """The fraction of each class that is set aside for validation. Each of its three cases has a name."""

    @property
    def is_nothing(self) -> bool:
        """0: the images of both splits lie apart, so nothing is divided."""
        return self == 0

    @property
    def is_part(self) -> bool:
        """Between 0 and 1: one folder has the images of both splits."""
        return 0 < self < 1

    @property
    def is_everything(self) -> bool:
        """1: all images are for validation, and training has none."""
        return self == 1


FRACTION = SetAside(0.2)  # unless the flag gives another
NOTHING = SetAside(0)


def set_aside(files: Sequence[str], labels: np.ndarray, fraction: SetAside) -> np.ndarray:
    """Returns which images are for validation, bool (images,): about this fraction of each class.

    A hash of its path decides for each image alone, so that a new image moves no other one. Otherwise all images of a
    class might be on one side: so the one with the smallest hash is always for validation, and the one with the largest
    for training, as is a single one.

    files: paths, relative to the folder with the classes. labels: int64 (images,).
    """
    if fraction.is_everything:
        return np.ones(len(files), bool)
    digests = b"".join(hashlib.sha256(os.fsencode(file)).digest()[:8] for file in files)
    hashes = np.frombuffer(digests, ">u8")
    chosen = hashes < fraction * 2.0**64
    by_class = np.lexsort([hashes, labels])
    chosen[by_class[np.diff(labels[by_class], prepend=-1) != 0]] = True
    chosen[by_class[np.diff(labels[by_class], append=-1) != 0]] = False
    return chosen
