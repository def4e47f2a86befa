"""The process that writes the files of a spool: `python -m data.staging.spool_writer`, started by data.staging.spool.

Standard input: a pickled (Layout, whether to start again after the last sample), then lines with two numbers: how many
files have been read, and how many are needed. Files are counted over all passes. Standard output: `written COUNT` after
each file, followed by `requests fetched hits` of data.staging.spool.Admitted since the start, or `error REASON`. It
ends when standard input does, and removes the folder, which it has made, and the window if it is not kept.
"""
import os
import pickle
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np

from common.errors import UserError, full_disk, one_line, shown
from common.files import remove_unheld, scratch_folder
from common.threads import start_service
from data.formats import messages
from data.staging.spool import Layout
from data.staging.window import Blocks

FILES_ASKED = 3  # those whose blocks are fetched at the same time
HEADER = struct.Struct("<QI")  # a TFRecord's length, and a checksum that DALI does not check


def main() -> None:
    try:
        layout, again = pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):
        return  # the reader has ended
    requests = Requests(sys.stdin.buffer)
    code, held = 0, ExitStack()
    try:
        held.enter_context(scratch_folder(path=layout.folder))
        write_ahead(layout, again, requests)
    except (OSError, ValueError, UserError) as error:
        print(f"error {shown(one_line(error))}", flush=True)
        requests.wait(lambda: False)  # the reader still needs the files that are there
    except Exception:
        traceback.print_exc()
        code = 1
    finally:  # also if nobody is there to be told
        held.close()
        if layout.split.window and not layout.split.window.is_kept:
            remove_unheld(layout.split.window.folder.parent, seconds=5)  # the reader may be ending
        os._exit(code)  # a thread may still read standard input, or a block


class Requests:
    """The reader's requests, as a thread reads them from standard input."""

    def __init__(self, stream):
        self.read = self.needed = 0  # numbers of files that were read, and that the reader needs to go on
        self._ended = False
        self._changed = threading.Condition()
        start_service("requests", self._listen, stream)

    def wait(self, is_enough: Callable[[], bool]) -> bool:
        """Waits until `is_enough` returns true. Returns True, or False if the reader has ended."""
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


def write_ahead(layout: Layout, again: bool, requests: Requests) -> None:
    """Writes one file after another, as long as the reader needs it or there is room, and deletes those read."""
    sizes = np.add.reduceat(layout.slots, layout.starts[:-1])
    bytes_before = np.concatenate([[0], np.cumsum(sizes)])
    blocks = Blocks(layout.split, layout.split.window) if layout.split.window else None
    written = deleted = 0
    room = layout.room

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
            if blocks:
                ask_ahead(layout, blocks, written)
            try:
                write_file(layout, written % layout.files, blocks)
            except OSError as error:
                if not full_disk(error):
                    raise
                room = ahead()  # from now on
                if written < requests.needed and not (blocks and blocks.shrink(2 * sizes[written % layout.files])):
                    raise
                continue
        written += 1
        traffic = f"{blocks.requests} {blocks.fetched} {blocks.hits}" if blocks else "0 0 0"
        sys.stdout.write(f"written {written} {traffic}\n")  # one write, of which a kill leaves no half
        sys.stdout.flush()


def write_file(layout: Layout, file: int, blocks: Blocks | None) -> None:
    """Writes a file of the spool. It appears under its name when it is complete."""
    entries = layout.entries(file)
    path = layout.path(file)
    samples = layout.samples[slice(*layout.starts[file:file + 2])]
    part = path.with_suffix(".part")
    with open(part, "wb") as output:
        output.truncate(entries[-1].sum())
        for position, example in (examples_of(blocks, samples) if blocks else examples(layout.split, samples)):
            offset, size = entries[position]
            if len(example) + HEADER.size > size:
                raise ValueError(f"{layout.split.name(samples[position])} is larger than its index says")
            content = HEADER.pack(len(example), 0) + example
            output.seek(offset)  # os.pwrite may write only a part, when the disk is full
            output.write(content.ljust(size, b"\0"))  # DALI's map of a hole needs space, too
    part.rename(path)


def examples(split, samples: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Yields (position among these samples, Example), file after file, in the order of the files."""
    positions = np.argsort(samples, kind="stable")
    records = split.records(samples[positions])
    for position, (image, label) in zip(positions.tolist(), records, strict=True):
        yield position, messages.example(image, label)


def examples_of(blocks: Blocks, samples: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Yields (position among these samples, Example), from blocks that were asked for."""
    for position, sample in enumerate(samples):
        try:
            yield position, blocks.example(int(sample))
        except ValueError as error:
            raise ValueError(f"{blocks.split.name(sample)} {error}") from None


def ask_ahead(layout: Layout, blocks: Blocks, written: int) -> None:
    """Asks for the blocks of the next file and of those after it, in the order in which they are needed."""
    wanted = []
    for visit in range(written, written + FILES_ASKED):
        first, end = layout.starts[visit % layout.files:][:2]
        epoch = 0 if layout.epochs is None else int(layout.epochs[first])
        wanted += [(block, epoch) for block in dict.fromkeys(blocks.of(layout.samples[first:end]).tolist())]
    blocks.ask(wanted)


if __name__ == "__main__":
    main()
