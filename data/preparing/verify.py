"""Checks each record of a prepared dataset: the checksum stored at preparation, and whether the image decodes."""
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import UserError
from data.dataset import Split, checksums_path, open_dataset
from data.preparing.images import Rejected, check
from data.team import Team, error_message

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
    bad = team.work(units, lambda part: _check(part, dataset, team), total)
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
    entries, start = part.split.entries[part.file], part.start
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
        return open_dataset(folder)
    except UserError as error:
        raise UserError(str(error).replace("--data_dir:", "--output:")) from None


def _check(part, dataset, team) -> list[tuple[str, str]]:
    rows, checksums = [], _checksums(part)
    for number, found in records(part):
        reason = found if isinstance(found, str) else (
            _checksum_differs(checksums, number, *found) or _label_is_none(found[1], dataset) or _undecodable(found[0]))
        if reason:
            name = part.path.relative_to(dataset.folder)
            rows.append((f"{part.path}/{part.split.entries[part.file].files[number]}" if dataset.format == "folder" else
                         f"{name}, record {number}", reason))
        team.beat(1)
    return rows


def _checksums(part):
    """Returns the checksums of a file: the lines stored at preparation, TFRecord's own, or None if there are none."""
    kept = checksums_path(part.path)
    if kept.exists():
        lines = kept.read_text(errors="replace").splitlines()
        if len(lines) != part.split.file_samples[part.file]:
            raise UserError(f"{kept} has {len(lines)} checksums for {part.split.file_samples[part.file]} records; "
                            "prepare the dataset again")
        return lines
    return _TensorFlows(part) if part.split.format == TENSORFLOWS_OWN else None


class _TensorFlows:
    """The checksums that TFRecord stores with each record."""

    def __init__(self, part):
        from tensorflow.python.lib.io import tf_record

        self.reader, self.entries = tf_record.tf_record_random_reader(str(part.path)), part.split.entries[part.file]

    def differs(self, number) -> bool:
        import tensorflow as tf

        try:
            self.reader.read(int(self.entries[number][0]))
        except (tf.errors.DataLossError, IndexError):
            return True
        return False


def _checksum_differs(checksums, number, image, label) -> str | None:
    if isinstance(checksums, _TensorFlows):
        return "its checksum differs" if checksums.differs(number) else None
    if checksums is not None and checksums[number] != f"{zlib.crc32(image):08x} {label}":
        return "its checksum differs from the one stored at preparation"
    return None


def _label_is_none(label, dataset) -> str | None:
    if not 0 <= label - dataset.first_label < len(dataset.classes):
        return f"there is no class for its label {label}"
    return None


def _undecodable(image) -> str | None:
    try:
        check(image)
    except Rejected as error:
        return str(error)
    return None
