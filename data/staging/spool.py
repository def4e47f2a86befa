"""The spool: what a worker reads next, in reading order, as TFRecord files that another process writes ahead of it.

DALI's readers of LMDB and RecordIO follow only the order in which a file was written. The order of the samples is known
in advance, so `data.staging.spool_writer` copies them in that order, and DALI's reader of TFRecords reads the copy from
front to back. Before a batch is read, `Spool.admit` waits until the files that DALI may open for it are there. Files
that were read are deleted.

DALI reads the indexes of all files when it opens, before they exist. So each record gets a slot whose size follows from
the stored size of the sample, and which its record does not have to fill.
"""
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.activity import DATA, activity
from common.errors import UserError
from common.files import in_memory, is_on_network, scratch_folder, scratch_path
from common.threads import start_service
from data.dataset import Split
from data.formats import tfrecord

ROOT = Path(__file__).parents[2]
SMALL_FILE = 8192  # bytes that the index of a slice takes in a file system, at most
RECORD = 112  # bytes by which a TFRecord may exceed the stored image: features' names, lengths, checksums
FIRST_FILE = 1 << 20  # bytes; each file may be twice as large as the one before it
LARGEST_FILE = 64 << 20
FIRST_SAMPLES = 256  # in the first file, at most; also doubled from file to file
LARGEST_SAMPLES = 16_384
AHEAD = 256 << 20  # bytes that are written before they are needed
READ_AHEAD = 8  # batches that DALI and TensorFlow may have opened before they are asked for; 3.5 were seen on a CPU


@dataclass(frozen=True)
class Layout:
    """The files of a spool: which samples lie where."""

    split: Split
    samples: np.ndarray  # their numbers in reading order, int64
    folder: Path  # for the files, a common.files.scratch_path
    kept: int  # number of samples at the start whose files stay, because DALI reads them again after the last sample
    room: int  # bytes that may be written before they are needed
    epochs: np.ndarray | None = None  # the epoch of each sample; None: epoch 0

    @cached_property
    def slots(self) -> np.ndarray:
        """The size of each record's slot, int64 (samples,)."""
        slots = np.empty(len(self.samples), np.int64)
        files = self.split.files_of(self.samples)
        for file in np.unique(files):
            chosen = files == file
            sizes = self.split.kind.stored_sizes(self.split.entries[file])
            slots[chosen] = sizes[self.samples[chosen] - self.split.file_starts[file]]
        return slots + RECORD

    @cached_property
    def starts(self) -> np.ndarray:
        """The first sample of each file, followed by the number of samples; int64 (files + 1,)."""
        largest = min(LARGEST_FILE, self.room // 4)
        size = min(FIRST_FILE, largest)
        count = FIRST_SAMPLES
        offsets = np.append(0, np.cumsum(self.slots))
        starts = [0]
        while (first := starts[-1]) < len(self.slots):
            fitting = int(np.searchsorted(offsets, offsets[first] + size, side="right")) - 1
            starts.append(max(first + 1, min(fitting, first + count)))
            size = min(2 * size, largest)
            count = min(2 * count, LARGEST_SAMPLES)
        return np.array(starts)

    @property
    def files(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def kept_files(self) -> int:
        return self.file_of(min(self.kept, len(self.samples)) - 1) + 1

    def path(self, file: int) -> Path:
        return self.folder / f"{file}.tfrecord"

    def file_of(self, sample: int) -> int:
        return int(np.searchsorted(self.starts, sample, side="right")) - 1

    def entries(self, file: int) -> np.ndarray:
        """Returns (offset, size) of the slots of a file, int64 (records, 2)."""
        sizes = self.slots[self.starts[file]:self.starts[file + 1]]
        return np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)

    def visit(self, read: int) -> int:
        """Returns the number of files read before a sample, counted over all passes through the samples."""
        passes, sample = divmod(read, len(self.samples))
        return passes * self.files + self.file_of(sample)


@contextmanager
def opened_reader(split: Split, samples: np.ndarray, batch_size: int, again: bool = False,
                  epochs: np.ndarray | None = None, mmap: str = "auto"
                  ) -> Iterator[tuple[Callable, "Spool | None"]]:
    """Yields a function that adds the reader of these samples to DALI's graph, and its spool, or None if it needs none.

    The function returns encoded images and labels. DALI can be asked for the first batches. again: as in Spool. epochs:
    as in Layout. mmap: as in DecoderSettings. A spool is always mapped.
    """
    with ExitStack() as held:
        spool = None
        if split.is_spooled:
            window = split.window
            place = window.folder.parent if window else in_memory(AHEAD + 2 * LARGEST_FILE)
            layout = Layout(split, samples, scratch_path(place), (READ_AHEAD + 1) * batch_size,
                            window.room if window else AHEAD, epochs)
            spool = held.enter_context(closing(Spool(layout, batch_size, again)))
        slices = spool.slices() if spool else split.slices(samples)
        scratch = held.enter_context(scratch_folder(in_memory(SMALL_FILE * len(slices))))
        is_mapped = spool or mmap == "true" or (mmap == "auto" and not is_on_network(slices[0][0]))
        kind = tfrecord if spool else split.kind
        read = kind.reader(slices, scratch, **{} if is_mapped else {"dont_use_mmap": True})
        if spool:
            spool.admit(0)
        yield read, spool


class Admitted(NamedTuple):
    """How long a worker waited for data in `admit`, and what was fetched since the previous call."""

    seconds: float = 0.0
    requests: int = 0  # number of blocks that were fetched from the bucket or the web server
    fetched: int = 0  # their bytes
    hits: int = 0  # number of blocks that were in the window


class SpoolEnded(UserError):
    """The next samples cannot be read."""


class Spool:
    """The files from which DALI reads the samples of a layout, again and again.

    again: whether they are read more than once. Otherwise nothing is written after the last one.
    """

    def __init__(self, layout: Layout, batch_size: int, again: bool):
        self.folder = layout.folder
        self._layout = layout
        self._lead = READ_AHEAD * batch_size
        self._again = again
        self._read = self._launched = 0  # samples whose reading was asked for, and those before the last request
        self._written = 0  # files
        self._problem = None
        self._traffic = self._seen = (0, 0, 0)  # as in Admitted, since the start; now, and in the last call of admit
        self._changed = threading.Condition()
        self._sent = None  # the last request
        layout.starts  # noqa: B018 -- so that both processes have the same
        self._writer = subprocess.Popen(
            [sys.executable, "-m", "data.staging.spool_writer"], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, start_new_session=True)  # a request to stop must not end it before the training
        start_service("spool", self._listen)
        self._send(pickle.dumps((layout, again)))

    def close(self) -> None:
        with suppress(BrokenPipeError):  # a request that could not be sent
            self._writer.stdin.close()
        self._writer.kill()
        self._writer.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def slices(self) -> list[tuple]:
        """Returns the slices to read, for data.formats.tfrecord.reader."""
        layout = self._layout
        return [(layout.path(file), layout.entries(file), np.arange(layout.starts[file + 1] - layout.starts[file]))
                for file in range(layout.files)]

    def admit(self, samples: int) -> Admitted:
        """Waits until the next samples can be read. Raises SpoolEnded if they cannot.

        The caller has finished with the samples that it had asked for before the previous call.
        """
        layout = self._layout
        began = time.perf_counter()
        done = self._launched
        self._launched = self._read
        self._read += samples
        last = self._read + self._lead
        if not self._again:
            last = min(last, len(layout.samples) - 1)
        needed = layout.visit(last) + 1
        if (request := (layout.visit(done), needed)) != self._sent:
            self._sent = request
            self._send(b"%d %d\n" % request)
        with self._changed, activity.during(DATA):
            self._changed.wait_for(lambda: self._written >= needed or self._problem)
            if self._written < needed:
                raise SpoolEnded(self._problem)
            new = np.subtract(self._traffic, self._seen).tolist()
            self._seen = self._traffic
        return Admitted(time.perf_counter() - began, *new)

    def _send(self, message: bytes) -> None:
        with suppress(BrokenPipeError):  # it has ended; _listen says why
            self._writer.stdin.write(message)
            self._writer.stdin.flush()

    def _listen(self) -> None:
        problem = None
        for line in self._writer.stdout:
            kind, _, text = line.decode().partition(" ")
            if kind == "error":
                problem = text.strip()
                break
            with self._changed:
                self._written, *traffic = map(int, text.split())
                self._traffic = tuple(traffic)
                self._changed.notify_all()
        code = self._writer.wait() if problem is None else 1
        with self._changed:
            self._problem = problem or f"the process that copies the samples for DALI ended with exit code {code}"
            self._changed.notify_all()
