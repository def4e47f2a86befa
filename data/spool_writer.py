"""The process that writes the files of a spool: `python -m data.spool_writer`, started by data.spool.

Standard input: a pickled (Layout, whether to start again after the last sample, room), then lines with two numbers: how
many files have been read, and how many are needed. Files are counted over all passes. Standard output: `written COUNT`
after each file, or `error REASON`. It ends when standard input does, and removes the folder.
"""
import os
import pickle
import shutil
import struct
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np

from common.errors import one_line
from data.formats import messages
from data.spool import Layout

HEADER = struct.Struct("<QI")  # a TFRecord's length, and a checksum that DALI does not check


def main() -> None:
    layout, again, room = pickle.load(sys.stdin.buffer)
    requests = Requests(sys.stdin.buffer)
    try:
        write_ahead(layout, again, room, requests)
    except (OSError, ValueError) as error:
        print(f"error {one_line(error)}", flush=True)
        requests.wait(lambda: False)  # the reader still needs the files that are there
    finally:
        shutil.rmtree(layout.folder, ignore_errors=True)


class Requests:
    """What the reader asks for. read: number of files read. needed: number of files that it waits for."""

    def __init__(self, stream):
        self.read = self.needed = 0
        self._ended, self._changed = False, threading.Condition()
        threading.Thread(target=self._listen, args=(stream,), daemon=True).start()

    def wait(self, is_enough: Callable[[], bool]) -> bool:
        """Waits until that is true. Returns whether it is, or False if the reader has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or is_enough())
            return not self._ended

    def _listen(self, stream) -> None:
        for line in stream:
            with self._changed:
                self.read, self.needed = map(int, line.split())
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def write_ahead(layout: Layout, again: bool, room: int, requests: Requests) -> None:
    """Writes one file after another, as long as the reader needs it or there is room, and deletes those read.

    room: bytes that may be written before they are needed.
    """
    sizes = np.add.reduceat(layout.slots, layout.starts[:-1])
    bytes_before = np.concatenate([[0], np.cumsum(sizes)])
    written = deleted = 0

    def ahead() -> int:
        """Bytes of the files that are written and not read."""
        passes = written // layout.files - requests.read // layout.files
        within = bytes_before[written % layout.files] - bytes_before[requests.read % layout.files]
        return passes * bytes_before[-1] + within

    def can_go_on() -> bool:
        has_room = written < requests.needed or ahead() < room
        return requests.read > deleted or (has_room and (again or written < layout.files))

    while requests.wait(can_go_on):
        if requests.read > deleted:
            for visit in range(deleted, read := requests.read):
                if visit % layout.files >= layout.kept_files and written <= visit + layout.files:
                    layout.path(visit % layout.files).unlink()
            deleted = read
            continue
        if not layout.path(written % layout.files).exists():  # a kept one does, or one of the last pass
            write_file(layout, written % layout.files)
        written += 1
        print(f"written {written}", flush=True)


def write_file(layout: Layout, file: int) -> None:
    """Writes a file of the spool. It appears under its name when it is complete."""
    first, end = layout.starts[file:file + 2]
    entries, path = layout.entries(file), layout.path(file)
    part = path.with_suffix(".part")
    with open(part, "wb") as output:
        output.truncate(entries[-1].sum())
        for position, image, label in records(layout.split, layout.samples[first:end]):
            example = messages.example(image, label)
            offset, size = entries[position]
            if len(example) + HEADER.size > size:
                raise ValueError(f"{layout.split.name(layout.samples[first + position])} is larger than its index says")
            os.pwritev(output.fileno(), [HEADER.pack(len(example), 0), example], offset)
    part.rename(path)


def records(split, samples: np.ndarray) -> Iterator[tuple[int, bytes, int]]:
    """Yields (position among these samples, encoded image, label), file after file, in the order of the files."""
    ascending = np.argsort(samples, kind="stable")
    files = np.searchsorted(split.file_starts, samples[ascending], side="right") - 1
    for positions in np.split(ascending, np.flatnonzero(np.diff(files)) + 1):
        file = int(np.searchsorted(split.file_starts, samples[positions[0]], side="right")) - 1
        numbers = samples[positions] - split.file_starts[file]
        found = split.kind.records(split.paths[file], split.entries[file], numbers)
        for position, (image, label) in zip(positions, found, strict=True):
            yield int(position), image, label


if __name__ == "__main__":
    main()
