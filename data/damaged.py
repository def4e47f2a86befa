"""Finds the images of a folder that DALI cannot decode, before a training reads them.

A file in the cache remembers which images were decoded, so that another start reads only those that are new or have
changed since.
"""
import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common.files import cache_folder, write_atomically
from common.streams import silent
from data.augmentation import Augmentation
from data.image_files import THREADS
from data.pipeline import decoder

REMEMBERED = 4_000_000  # images, of 8 bytes each
MOST = 64  # images that are decoded at a time


def states(paths: Sequence[str]) -> np.ndarray:
    """Returns a digest of path, size and time of change of each file, uint64 (paths,). Raises OSError."""
    with ThreadPoolExecutor(THREADS) as pool:
        return np.array([*pool.map(_state, paths)], np.uint64)


def _state(path: str) -> int:
    known = os.stat(path)
    text = f"{path}\0{known.st_size}\0{known.st_mtime_ns}".encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def remembered() -> np.ndarray:
    """Returns the states of the images that were decoded, uint64, oldest first."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        return np.frombuffer(_memory().read_bytes(), "<u8")
    return np.zeros(0, np.uint64)


def remember(decoded: np.ndarray) -> None:
    """Adds states of images that were decoded. Without a cache that can be written, they are decoded again."""
    with contextlib.suppress(OSError, RuntimeError):  # such as that of a user without a home
        write_atomically(_memory(), np.concatenate([remembered(), decoded])[-REMEMBERED:].astype("<u8").tobytes())


def _memory() -> Path:
    return cache_folder() / "decoded"


def are_damaged(paths: Sequence[str], threads: int, done: Callable[[int], None]) -> np.ndarray:
    """Returns whether DALI's decoder on the CPU fails on each image, bool (paths,). Raises OSError if one has no file.

    It reads the next images while it decodes some. done: called with the number of images that were decoded.
    """
    fails, size = [], min(2 * threads, MOST)
    decoding, reading = Decoding(size, threads), []
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(paths) + size, size):
            now = reading
            reading = [pool.submit(np.fromfile, path, np.uint8) for path in paths[start:start + size]]
            fails += decoding.fails([image.result() for image in now])
            done(len(now))
    return np.array(fails, bool)


class Decoding:
    """Decodes images as training does, several at a time.

    size: their number, at most. threads: that decode them.
    """

    def __init__(self, size: int, threads: int):
        self._size, self._threads = size, threads
        self._pipeline = None

    def fails(self, images: list[np.ndarray]) -> list[bool]:
        """Returns whether each of these encoded images cannot be decoded."""
        if self._decodes(images):
            return [False] * len(images)
        return [not self._decodes([image]) for image in images]

    def _decodes(self, images: list[np.ndarray]) -> bool:
        if not all(map(len, images)):
            return False
        self._pipeline = self._pipeline or decoder(Augmentation(enlarge=None), self._size, self._threads)
        try:
            if images:
                self._pipeline.feed_input("encoded", images)
                with silent():  # of lines without the name of the image
                    self._pipeline.run()
        except RuntimeError:
            self._pipeline = None  # after an error, a pipeline is of no use
        return self._pipeline is not None
