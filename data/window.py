"""The window: blocks of data from far away, kept on a local disk of each node within a given size.

A block is a run of consecutive records of a file, which one request fetches. All workers of a node share the window. If
a block does not fit, those that will be needed last are deleted: the order of the samples is known for all epochs.
"""
import atexit
import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from common.errors import complain
from common.files import locked, private_folder
from data import order
from data.dataset import Split, Window
from data.formats import messages
from data.remote import ranges

REQUESTS = 8  # at a time, of one worker
FULL = 0.98  # fraction of a window that is used, at most, before blocks are deleted


@cache
def window_folder(place: Path, name: str) -> Path:
    """Creates this user's folder of that name in a place, which stays until the last process that has it open ends.

    Removes those of processes that were killed.
    """
    private = private_folder(place)
    folder = private / f"window-{name}"
    for left in set(private.glob("window-*")) - {folder}:
        remove_unused(left)
    descriptor = None
    while descriptor is None or not folder.exists():  # another training may take it for unused before it is locked
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)

    @atexit.register
    def release():
        os.close(descriptor)
        remove_unused(folder)

    return folder


def remove_unused(folder: Path, seconds: float = 0) -> None:
    """Removes the folder of a window, unless a process has it open. seconds: to wait for that process's end."""
    end, is_first = time.monotonic() + seconds, True
    while folder.exists() and (is_first or time.monotonic() < end):
        with contextlib.suppress(OSError), locked(folder):
            shutil.rmtree(folder)
        time.sleep(min(seconds, 0.1))
        is_first = False


class Blocks:
    """The blocks of a split, from the window or from far away. Several are fetched at a time.

    The bytes of a block are in memory as long as it is among those last asked for.
    """

    def __init__(self, split: Split, window: Window):
        self.split, self._window = split, window
        window.folder.mkdir(exist_ok=True)
        self._starts = order.block_starts(split, window.block)
        self._files = split.files_of(self._starts)
        self._pool = ThreadPoolExecutor(REQUESTS, "blocks")
        self._asked: dict[int, Future] = {}
        self._mutex = threading.Lock()
        self._fits = sum(int(split.kind.stored_sizes(one).sum()) for one in split.entries) <= window.size
        self._unlisted = window.size  # bytes stored since the folder was listed; at first, as much as there may be
        self._order: dict[int, np.ndarray] = {}  # place of each block in the order of an epoch
        self._now, self._has_complained = (0, 0), False
        self.requests = self.fetched = self.hits = 0  # as in data.spool.Admitted, since the start

    def of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the block of each sample."""
        return np.searchsorted(self._starts, samples, side="right") - 1

    def ask(self, wanted: list[tuple[int, int]]) -> None:
        """Begins to read the blocks that are needed next: (block, epoch of the training), ... Forgets all others."""
        before, self._asked = self._asked, {}
        block, epoch = wanted[0 if self._window.is_shared else -1]
        self._now = epoch, int(self._ranks(epoch)[block])
        for block, _ in wanted:
            if block not in self._asked:
                self._asked[block] = before.get(block) or self._pool.submit(self._read, block)

    def example(self, sample: int) -> bytes:
        """Returns the record of a sample as an Example. Its block has to be asked for. Raises OSError, ValueError."""
        block = int(self.of(sample))
        file = self._files[block]
        offset, size = map(int, self.split.entries[file][sample - self.split.file_starts[file]][:2])
        start, content = self._asked[block].result()
        example = self.split.kind.example(content[offset - start:offset - start + size])
        checksums = self.split.checksums and self.split.checksums[file]
        if checksums is not None:
            expected = checksums[sample - self.split.file_starts[file]]
            if zlib.crc32(messages.image_of(example)) != expected:
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
        kept, (start, end) = self._window.folder / str(block), self._range(block)
        if (content := self._found(kept, end - start)) is None:
            part = self._window.folder / f"{block}.part"
            with locked(part, wait=True):  # by one worker of the node
                if (content := self._found(kept, end - start)) is None:
                    content = self._fetch(self._files[block], start, end)
                    self._keep(content, part, kept)
        return start, content

    def _fetch(self, file: int, start: int, end: int) -> bytes:
        with ranges(self.split.paths[file]) as read:
            content = read(start, end)
        with self._mutex:
            self.requests, self.fetched = self.requests + 1, self.fetched + len(content)
        return content

    def _found(self, kept: Path, size: int) -> bytes | None:
        """Returns a block of the window, or None if it is not there."""
        try:
            content = kept.read_bytes()
        except FileNotFoundError:
            return None
        if len(content) != size:
            return None
        with self._mutex:
            self.hits += 1
        return content

    def _keep(self, content: bytes, part: Path, kept: Path) -> None:
        """Puts a block into the window. What cannot be written is not kept."""
        try:
            with self._mutex:
                self._unlisted += len(content)
                if not self._fits and self._unlisted > self._window.size * (1 - FULL) / 2:
                    self._make_room(len(content))
            part.write_bytes(content)
            part.rename(kept)
        except OSError as error:
            part.unlink(missing_ok=True)
            with self._mutex:
                self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            complain(f"{self._window.folder}: {error.strerror}; what does not fit is fetched again", "data")
        self._has_complained = True

    def shrink(self, size: int) -> bool:
        """Deletes blocks of this size in all, because the disk is full. Returns whether there were any.

        They are those that will be needed last. If this split has none, they are any of the other.
        """
        with self._mutex:
            self._complain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            if self._delete(lambda used: used - size):
                return True
        others = list(self._window.folder.parent.glob("*/[0-9]*[0-9]"))
        for path in others[:-(-len(others) // 4)]:
            path.unlink(missing_ok=True)
        return bool(others)

    def _make_room(self, coming: int) -> None:
        """Deletes what will be needed last if the window is too full."""
        self._delete(lambda used: int(self._window.size * FULL) - coming)
        self._unlisted = 0

    def _delete(self, remaining: Callable[[int], int]) -> bool:
        """Deletes the blocks that will be needed last, until no more than `remaining(used bytes)` remain."""
        with locked(self._window.folder, wait=True):
            sizes = {int(entry.name): entry.stat().st_size for entry in os.scandir(self._window.folder)
                     if entry.name.isdigit()}
            epoch, now = self._now
            ranks, later = self._ranks(epoch), self._ranks(epoch + 1)
            use = {block: ranks[block] if ranks[block] >= now else len(ranks) + later[block] for block in sizes}
            used = sum(sizes.values())
            limit = remaining(used)
            for block in sorted(sizes, key=use.get, reverse=True):
                if used <= limit:
                    break
                (self._window.folder / str(block)).unlink(missing_ok=True)
                used -= sizes[block]
        return bool(sizes)

    def _ranks(self, epoch: int) -> np.ndarray:
        """Returns the place of each block in the order of an epoch."""
        if self._window.seed is None:
            return np.arange(len(self._starts))
        if epoch not in self._order:
            chosen = order.block_order(self.split, self._window.seed, epoch, self._window.block)
            self._order = {one: ranks for one, ranks in self._order.items() if one >= epoch - 1}
            self._order[epoch] = np.argsort(chosen)
        return self._order[epoch]
