"""The window: blocks of data from a bucket or a slow disk, kept on a local disk of each node within a given size.

A block is a run of consecutive records of a file, which one request fetches. All workers of a node share the window. If
a block does not fit, those that will be needed last are deleted: the order of the samples is known for all epochs.
In --stage_dir, the window stays until a training on other data begins. Its name is a digest of the files' sizes and
tags, and each block ends with its CRC-32.
"""
import atexit
import errno
import hashlib
import os
import struct
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from common.errors import complain
from common.files import hold, locked, private_folder, remove_unheld
from data import order
from data.dataset import Dataset, Split, Window
from data.formats import messages
from data.staging.remote import ranges

REQUESTS = 8  # at a time, of one worker
CHECKSUM = struct.Struct("<I")
FULL = 0.98  # fraction of a window that is used, at most, before blocks are deleted
complain_once = cache(complain)


@cache
def window_folder(place: Path, name: str, stays: bool = False) -> Path:
    """Creates this user's folder of that name in a place, and holds it until this process ends.

    Removes those of other data that no process holds. stays: whether the folder stays after the last process that holds
    it, for the next training on the same data.
    """
    private = private_folder(place)
    folder = private / f"blocks-{name}"
    for left in set(private.glob("blocks-*")) - {folder}:
        remove_unheld(left)
    descriptor = hold(folder)

    @atexit.register
    def release():
        os.close(descriptor)
        if not stays:
            remove_unheld(folder)

    return folder


def name_of(dataset: Dataset, block: int) -> str:
    """Returns a digest of the files of a dataset, their sizes and tags, and the size of a block. Raises OSError."""
    files = [(samples, str(path), state.st_size, state.st_mtime_ns) for split in (dataset.train, dataset.validation)
             for path, samples in zip(split.paths, split.file_samples, strict=True) for state in [path.stat()]]
    return hashlib.sha256(repr((block, files)).encode()).hexdigest()[:16]


class Blocks:
    """The blocks of a split, read from the window or fetched. Several are fetched at a time.

    `ask` begins to read blocks into memory, and frees all others.
    """

    def __init__(self, split: Split, window: Window):
        self.split = split
        self._window = window
        window.folder.mkdir(exist_ok=True)
        self._starts = order.block_starts(split, window.block)
        self._files = split.files_of(self._starts)
        self._pool = ThreadPoolExecutor(REQUESTS, "blocks")
        self._asked: dict[int, Future] = {}
        self._mutex = threading.Lock()
        self._fits = split.stored_size + CHECKSUM.size * len(self._starts) <= window.size
        self._unlisted = window.size  # bytes stored since the folder was listed; at first, as much as there may be
        self._read_in = lru_cache(2 * window.repeats + 1)(self._blocks_read)  # several threads call it
        self._now = (0, 0)  # epoch, and position in its blocks
        self.requests = self.fetched = self.hits = 0  # as in data.staging.spool.Admitted, since the start
        if not self._fits:
            self._delete(lambda used: window.size)  # an earlier training may have had more

    def of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the block of each sample."""
        return np.searchsorted(self._starts, samples, side="right") - 1

    def ask(self, wanted: list[tuple[int, int]]) -> None:
        """Begins to read the blocks that are needed next: (block, epoch of the training), ... Forgets all others."""
        block, epoch = wanted[0 if self._window.is_shared else -1]
        self._now = epoch, int(np.flatnonzero(self._read_in(epoch) == block)[0])
        before = self._asked
        self._asked = {block: before.get(block) or self._pool.submit(self._read, block)
                       for block in dict.fromkeys(block for block, _ in wanted)}

    def example(self, sample: int) -> bytes:
        """Returns the record of a sample as an Example. Its block has to be asked for. Raises OSError, ValueError.

        If the record is damaged, its block is fetched once more.
        """
        try:
            return self._example(sample)
        except ValueError:
            block = int(self.of(sample))
            (self._window.folder / str(block)).unlink(missing_ok=True)
            self._asked[block] = self._pool.submit(self._read, block)
            return self._example(sample)

    def _example(self, sample: int) -> bytes:
        block = int(self.of(sample))
        file = self._files[block]
        offset, size = map(int, self.split.entries[file][sample - self.split.file_starts[file]][:2])
        start, content = self._asked[block].result()
        example = self.split.kind.example(content[offset - start:offset - start + size])
        image = messages.read_example(example)[0]
        checksums = self.split.checksums and self.split.checksums[file]
        if checksums is not None and zlib.crc32(image) != checksums[sample - self.split.file_starts[file]]:
            raise ValueError("has another checksum than data.prepare stored")
        return example

    def _range(self, block: int) -> tuple[int, int]:
        """Returns where the bytes of a block begin and end in its file."""
        file = self._files[block]
        first = self._starts[block] - self.split.file_starts[file]
        rows = self.split.entries[file][first:min(first + self._window.block, self.split.file_samples[file])]
        return int(rows[:, 0].min()), int(rows[:, :2].sum(axis=1).max())

    def _read(self, block: int) -> tuple[int, bytes]:
        """Returns where a block begins in its file, and its bytes."""
        kept = self._window.folder / str(block)
        start, end = self._range(block)
        if (content := self._kept(kept, end - start)) is None:
            part = self._window.folder / f"{block}.part"
            with locked(part, wait=True, needed=True):  # by one worker of the node
                if (content := self._kept(kept, end - start)) is None:
                    content = self._fetch(self._files[block], start, end)
                    self._keep(content, part, kept)
        return start, content

    def _fetch(self, file: int, start: int, end: int) -> bytes:
        with ranges(self.split.paths[file]) as read:
            content = read(start, end)
        with self._mutex:
            self.requests += 1
            self.fetched += len(content)
        return content

    def _kept(self, kept: Path, size: int) -> bytes | None:
        """Returns a block of the window, or None if it is not there, intact."""
        try:
            stored = kept.read_bytes()
        except FileNotFoundError:
            return None
        content = stored[:size]
        if stored[size:] != CHECKSUM.pack(zlib.crc32(content)):
            return None
        with self._mutex:
            self.hits += 1
        return content

    def _keep(self, content: bytes, part: Path, kept: Path) -> None:
        """Writes a block into the window. If the disk is full, one line says so, and the block is not kept."""
        try:
            with self._mutex:
                self._unlisted += len(content) + CHECKSUM.size
                if not self._fits and self._unlisted > self._window.size * (1 - FULL) / 2:
                    self._delete(lambda used: int(self._window.size * FULL) - len(content))
                    self._unlisted = 0
            part.write_bytes(content + CHECKSUM.pack(zlib.crc32(content)))
            part.rename(kept)
        except OSError as error:
            part.unlink(missing_ok=True)
            with self._mutex:
                self._complain(error.strerror)

    def _complain(self, problem: str) -> None:
        complain_once(f"{self._window.folder}: {problem}; what does not fit is fetched again", "data")

    def shrink(self, size: int) -> bool:
        """Deletes blocks of this size in all, because the disk is full. Returns whether there were any.

        They are those that will be needed last. If this split has none, they are any of the other.
        """
        with self._mutex:
            self._complain(os.strerror(errno.ENOSPC))
            if self._delete(lambda used: used - size):
                return True
        others = list(self._window.folder.parent.glob("*/[0-9]*[0-9]"))
        for path in others[:-(-len(others) // 4)]:
            path.unlink(missing_ok=True)
        return bool(others)

    def _delete(self, remaining: Callable[[int], int]) -> bool:
        """Deletes the blocks that will be needed last, until no more than `remaining(used bytes)` remain."""
        with locked(self._window.folder, wait=True, needed=True):
            sizes = {int(entry.name): entry.stat().st_size for entry in os.scandir(self._window.folder)
                     if entry.name.isdigit()}
            epoch, now = self._now
            use = np.full(len(self._starts), np.inf)
            for ahead in reversed(range(2 * self._window.repeats)):  # epochs in which almost all blocks are read
                read = self._read_in(epoch + ahead)[0 if ahead else now:]
                use[read] = ahead * len(use) + np.arange(len(read))
            used = sum(sizes.values())
            limit = remaining(used)
            for block in sorted(sizes, key=use.item, reverse=True):
                if used <= limit:
                    break
                (self._window.folder / str(block)).unlink(missing_ok=True)
                used -= sizes[block]
        return bool(sizes)

    def _blocks_read(self, epoch: int) -> np.ndarray:
        """Returns the blocks that an epoch reads, in this order."""
        window = self._window
        if window.seed is None:
            return np.arange(len(self._starts))
        return order.blocks_read(self.split, window.seed, epoch, window.block, window.group, window.repeats)
