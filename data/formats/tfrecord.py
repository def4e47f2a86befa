"""TFRecord shards, each with the index that DALI reads: one line `offset size` per record, in bytes."""
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from common.files import write_atomically
from data.formats import messages
from data.formats.messages import IMAGE, LABEL
from data.staging.remote import RemotePath, located, ranges

SUFFIX = ".tfrecord"
ANY_ORDER = True
FRAMING = 16  # bytes per record besides its data: length 8, its checksum 4, the data's checksum 4
FOLDERS = "one folder per class, and run data.prepare with --source"
FOREIGN = {  # how files begin that are no TFRecords, and what to do
    rb"\x1f\x8b": "is compressed with gzip; decompress it with `gunzip -c`",
    rb"\x78[\x01\x5e\x9c\xda]": "is compressed with zlib; read its records with tf.data.TFRecordDataset(file, 'ZLIB') "
                                "and write them with tf.io.TFRecordWriter",
    rb".{257}ustar": f"is a tar archive; unpack its images into {FOLDERS}",
    rb"PK\x03\x04": f"is a zip archive; unpack its images into {FOLDERS}",
    rb"PAR1": f"is a Parquet file; write its images into {FOLDERS}",
    rb"": "is not a TFRecord, because the checksum of the first length is wrong; if it does not belong to the dataset, "
          "move it to another folder"}


def index_path(path) -> Path | RemotePath:
    path = located(path)
    return path.with_name(f"{path.name}.idx")


def write(path, samples: Iterable[tuple]) -> None:
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for sample in samples:
            writer.write(messages.example(*sample))
    make_index(path)


def make_index(path) -> None:
    write_index(index_path(path), scan(path))


def scan(path) -> np.ndarray:
    """Returns the (offset, size) of each record in a shard, int64 (records, 2), by following the record lengths.

    Raises ValueError if the file ends inside a record or is something else.
    """
    size = Path(path).stat().st_size
    offset = 0
    entries = []
    with open(path, "rb") as file:
        while offset < size:
            file.seek(offset)
            header = file.read(8)
            length = int.from_bytes(header, "little") + FRAMING
            if offset + length > size:
                foreign = _foreign(header + file.read(256)) if not entries else None
                raise ValueError(f"{path} {foreign or f'is truncated; it ends inside record {len(entries)}'}")
            entries.append((offset, length))
            offset += length
    return np.array(entries, np.int64).reshape(-1, 2)


def _foreign(start: bytes) -> str | None:
    """Returns what a file is that begins with these bytes, and what to do, or None if it begins with a TFRecord."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    if start[8:12] == struct.pack("<I", masked_crc32c(start[:8])):
        return None
    return next(text for pattern, text in FOREIGN.items() if re.match(pattern, start, re.DOTALL))


def write_index(path, entries: np.ndarray) -> None:
    write_atomically(path, "".join(f"{offset} {size}\n" for offset, size in entries.tolist()))


def index_lines(entries: np.ndarray) -> np.ndarray:
    """Returns the text of an index, one row per record, uint8 (records, width).

    Many small files are written faster from it than by `write_index`. All lines have the same length: numbers have
    leading zeros, which DALI ignores.
    """
    lines = []
    for column, end in zip(entries.T, b" \n", strict=True):
        width = len(str(column.max(initial=0)))
        powers = 10 ** np.arange(width - 1, -1, -1)
        lines += [column[:, None] // powers % 10 + ord("0"), np.full((len(column), 1), end)]
    return np.concatenate(lines, axis=1).astype(np.uint8)


def read_index(path) -> np.ndarray:
    """Returns the (offset, size) of each record, int64 (records, 2), from the index file next to the shard.

    Raises ValueError if the index is malformed, points beyond the shard's end or belongs to another shard, and OSError
    if one of the two files is missing.
    """
    path = located(path)
    size = path.stat().st_size
    name = index_path(path)
    try:
        index = np.array(name.read_bytes().split(), np.int64).reshape(-1, 2)
    except (ValueError, OverflowError):
        raise ValueError(f"{name} is not an index with one line 'offset size' per record") from None
    if len(index) and (index[:, 0].min() < 0 or index[:, 1].min() <= FRAMING):
        raise ValueError(f"{name} is not a TFRecord index")
    if len(index) and index.sum(axis=1).max() > size:
        raise ValueError(f"{path} is truncated; it has {size} bytes, and its index points beyond its end")
    starts = np.sort(index[:, 0])
    ends = np.sort(index.sum(axis=1))
    if not np.array_equal(np.append(starts, size), np.insert(ends, 0, 0)):
        raise ValueError(f"{name} is not the index of {path}, which has {size} bytes")
    return index


def example(stored: bytes) -> bytes:
    if len(stored) < FRAMING or struct.unpack("<Q", stored[:8])[0] != len(stored) - FRAMING:
        raise ValueError("is not a TFRecord")
    return stored[12:-4]


def source_name(path, index, sample: int) -> str | None:
    offset, size = index[sample].tolist()
    with ranges(path) as read:
        return messages.name_of(example(read(offset, offset + size)))


def stored_sizes(index: np.ndarray) -> np.ndarray:
    return index[:, 1]


def records(path, index, samples) -> Iterator[tuple[bytes, int]]:
    """Raises ValueError if a record is not an Example with one image and one label."""
    for image, label, _ in examples(path, index, samples):
        yield image, label


def examples(path, index, samples) -> Iterator[tuple]:
    """Yields (image, label, features by name) of these records. Raises ValueError, as messages.checked does."""
    with ranges(path) as read:
        for sample, (offset, size) in zip(samples, index[samples].tolist(), strict=True):
            try:
                yield messages.read_example(read(offset, offset + size)[12:-4])
            except ValueError as error:
                raise ValueError(f"{path}: record {sample}, at byte {offset}, {error}") from None


def reader(slices, scratch: Path, **options):
    paths = [str(path) for path, *_ in slices]
    indexes = [f"{scratch}/{number}.idx" for number in range(len(slices))]
    lines = index_lines(np.concatenate([index[samples] for _, index, samples in slices]))
    ends = np.cumsum([len(samples) for *_, samples in slices])
    for index, part in zip(indexes, np.split(lines, ends[:-1]), strict=True):
        part.tofile(index)

    def read():
        from nvidia.dali import fn, tfrecord

        record = fn.readers.tfrecord(
            path=paths, index_path=indexes, name="reader", **options,
            features={IMAGE: tfrecord.FixedLenFeature((), tfrecord.string, ""),
                      LABEL: tfrecord.FixedLenFeature([1], tfrecord.int64, -1)})
        return record[IMAGE], record[LABEL]

    return read
