"""Checks each record of a prepared dataset: the checksum stored at preparation, and whether the image decodes."""
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import UserError
from data import checksums
from data.dataset import Split, open_dataset
from data.images import Rejected, check
from data.preparing.team import Team, error_message
from data.set_aside import FRACTION

PART = 1024  # records
TENSORFLOWS_OWN = "tfrecord"  # the only format whose records carry checksums


@dataclass(frozen=True)
class Part:
    """Records start to stop of one file of a split."""

    split: Split
    file: int
    start: int
    stop: int

    @property
    def path(self) -> Path:
        return self.split.paths[self.file]


def verify(folder: Path, team: Team) -> int:
    """Prints each bad record. Returns the exit code: 0 if there is none, else 1. Raises UserError."""
    dataset = team.on_rank_0(lambda: _opened(folder))
    units = parts(dataset.train) + parts(dataset.validation)
    total = dataset.train.samples + dataset.validation.samples
    bad = team.work(units, lambda part: _check(part, dataset, team), total, name="checking")
    rows = [row for part in bad for row in part]
    for name, reason in rows:
        team.log(f"{folder}: {name}: {reason}")
    count = team.on_rank_0(lambda: len(rows))
    team.log(f"{folder}: {count:,} of {total:,} records cannot be used" if count else
             f"{folder}: {dataset.train.samples:,} training and {dataset.validation.samples:,} validation images of "
             f"{len(dataset.classes)} classes are intact")
    if count:
        team.barrier()
    return 1 if count else 0


def parts(split: Split) -> list[Part]:
    return [Part(split, number, start, min(start + PART, count)) for number, count in enumerate(split.file_samples)
            for start in range(0, count, PART)]


def records(part: Part) -> Iterator[tuple[int, tuple[bytes, int] | str]]:
    """Yields (record number, (encoded image, label)), with an error message in place of the pair if a record is bad.

    Continues after a bad record.
    """
    entries = part.split.entries[part.file]
    start = part.start
    while start < part.stop:
        try:
            for pair in part.split.kind.records(part.path, entries, np.arange(start, part.stop)):
                yield start, pair
                start += 1
            return
        except Exception as error:  # from LMDB, protocol buffers or the disk
            yield start, error_message(error)
            start += 1


def _opened(folder):
    try:
        return open_dataset(folder, fraction=1 if (folder / "dataset.json").exists() else FRACTION)
    except UserError as error:
        raise UserError(str(error).replace("--data_dir:", "--output:")) from None


def _check(part, dataset, team) -> list[tuple[str, str]]:
    rows = []
    checksum_problem = _checksum_check(part)
    for number, record in records(part):
        if isinstance(record, str):
            problem = record
        else:
            problem = checksum_problem(number, *record) or _other_problem(*record, dataset)
        if problem:
            sample = int(part.split.file_starts[part.file]) + number
            place, source = f"{part.path.relative_to(dataset.folder)}, record {number}", part.split.source_name(sample)
            rows.append((part.split.name(sample), problem) if dataset.format == "folder" else
                        (place, f"{source}: {problem}" if source else problem))
        team.beat(1)
    return rows


def _checksum_check(part) -> Callable[[int, bytes, int], str | None]:
    """Returns a function of (record number, image, label) that returns what is wrong with the record's checksum.

    The checksums are the lines stored at preparation, or else those that TFRecord stores with each record.
    """
    kept = checksums.path_of(part.path)
    if kept.exists():
        lines = kept.read_text(errors="replace").splitlines()
        if len(lines) != part.split.file_samples[part.file]:
            raise UserError(f"{kept} has {len(lines)} checksums for {part.split.file_samples[part.file]} records; "
                            "prepare the dataset again")
        return lambda number, image, label: None if f"{lines[number]} ".startswith(
            f"{zlib.crc32(image):08x} {label} ") else (
            "its checksum differs from the one stored at preparation")
    if part.split.format != TENSORFLOWS_OWN:
        return lambda number, image, label: None
    import tensorflow as tf
    from tensorflow.python.lib.io import tf_record

    reader = tf_record.tf_record_random_reader(str(part.path))

    def of_tensorflow(number, image, label):
        try:
            reader.read(int(part.split.entries[part.file][number][0]))
        except (tf.errors.DataLossError, IndexError):
            return "its checksum differs"
        return None

    return of_tensorflow


def _other_problem(image, label, dataset) -> str | None:
    if not 0 <= label - dataset.first_label < len(dataset.classes):
        return f"there is no class for its label {label}"
    try:
        check(image)
    except Rejected as error:
        return str(error)
    return None
