"""RecordIO as MXNet's im2rec writes it, with the index that DALI reads: one line `number offset` per record.

A record consists of a magic word, a word with its length and continuation flag, and the data, padded to a multiple of
four bytes. Data that contains the magic word is split there into several parts. The data consists of a header (flag,
label, id, id2) and the image.
"""
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from common.files import write_atomically
from data.formats import messages, sequential
from data.staging.remote import RemotePath, located, ranges

SUFFIX = ".rec"
ANY_ORDER = False
MAGIC = struct.pack("<I", 0xced7230a)
HEADER = struct.Struct("<IfQQ")
COMPLETE, FIRST, MIDDLE, LAST = range(4)
LENGTH_BITS = 29


def index_path(path) -> Path | RemotePath:
    return located(path).with_suffix(".idx")


def write(path, samples: Iterable[tuple]) -> None:
    offsets = []
    with open(path, "wb") as file:
        for number, (image, label, *_) in enumerate(samples):
            offsets.append(file.tell())
            parts = _split(HEADER.pack(0, label, number, 0) + image)
            for index, part in enumerate(parts):
                file.write(MAGIC + struct.pack("<I", _continuation(index, len(parts)) << LENGTH_BITS | len(part)))
                file.write(part + bytes(-len(part) % 4))
    _write_index(index_path(path), offsets)


def make_index(path) -> None:
    _write_index(index_path(path), scan(path))


def scan(path) -> np.ndarray:
    """Returns the offset of each record, int64 (records,).

    Raises ValueError if the file is damaged or ends inside a record.
    """
    size = Path(path).stat().st_size
    offset = 0
    offsets = []
    with open(path, "rb") as file:
        while offset < size:
            file.seek(offset)
            length, continuation = _header(path, offset, file.read(8))
            if continuation in (COMPLETE, FIRST):
                offsets.append(offset)
            offset += 8 + length + -length % 4
            if offset > size or (offset == size and continuation in (FIRST, MIDDLE)):
                raise ValueError(f"{path} is truncated; it ends inside record {len(offsets) - 1}")
    return np.array(offsets, np.int64)


def read_index(path) -> np.ndarray:
    """Returns (offset, size with padding) of each record, int64 (records, 2), ascending as DALI sorts them.

    Raises ValueError if the index is malformed or the shard does not end with its last record, and OSError if one of
    the two files is missing.
    """
    path = located(path)
    size = path.stat().st_size
    name = index_path(path)
    try:
        offsets = np.sort(np.array(name.read_bytes().split(), np.int64).reshape(-1, 2)[:, 1])
    except (ValueError, OverflowError):
        raise ValueError(f"{name} is not an index with one line 'number offset' per record") from None
    if len(offsets) and (offsets[0] != 0 or (np.diff(offsets) <= 0).any()):
        raise ValueError(f"{name} is not a RecordIO index")
    if len(offsets) and offsets[-1] >= size:
        raise ValueError(f"{path} is truncated; it has {size} bytes, and its index points beyond its end")
    for offset in map(int, offsets[-1:]):
        with ranges(path) as read:
            _, end = _parsed(read(offset, size), path, offset)
        if end != size:
            raise ValueError(f"{path} has {size} bytes, but its last record ends at byte {end}; the file is truncated, "
                             "or the index belongs to another file")
    return np.stack([offsets, np.diff(offsets, append=size)], axis=1)


def stored_sizes(index: np.ndarray) -> np.ndarray:
    return index[:, 1]


def source_name(path, index, sample: int) -> None:
    """im2rec keeps the names in its list of images, outside the records."""


def records(path, index, samples) -> Iterator[tuple[bytes, int]]:
    """Raises ValueError if a record is damaged."""
    with ranges(path) as read:
        for offset, size in index[samples].tolist():
            data, _ = _parsed(read(offset, offset + size), path, offset)
            try:
                yield _image_and_label(data)
            except ValueError as error:
                raise ValueError(f"{path}: the record at byte {offset} {error}") from None


def example(stored: bytes) -> bytes:
    data, _ = _parsed(stored, "it", 0)
    return messages.example(*_image_and_label(data))


def _image_and_label(data: bytes) -> tuple[bytes, int]:
    if len(data) < HEADER.size:
        raise ValueError("contains no image")
    flag, label, _, _ = HEADER.unpack_from(data)
    if flag:
        raise ValueError(f"has a list of {flag} labels instead of one; write the dataset again with one label each")
    return messages.checked([data[HEADER.size:]], [label])


def reader(slices, scratch: Path, **options):
    arguments = sequential.reader_arguments(slices) | options
    starts = np.cumsum([0, *(Path(path).stat().st_size for path, *_ in slices)])
    _write_index(scratch / "all.idx", np.concatenate([
        start + index[:, 0] for start, (_, index, _) in zip(starts, slices, strict=False)]))

    def read():
        from nvidia.dali import fn

        return sequential.labelled(*fn.readers.mxnet(index_path=[str(scratch / "all.idx")], **arguments))

    return read


def _split(data: bytes) -> list[bytes]:
    """Splits the data at magic words whose offset is a multiple of four, where a reader would look for them."""
    parts = []
    start = 0
    for match in re.finditer(re.escape(MAGIC), data):
        if match.start() % 4 == 0:
            parts.append(data[start:match.start()])
            start = match.end()
    return [*parts, data[start:]]


def _continuation(index, count):
    if count == 1:
        return COMPLETE
    return FIRST if index == 0 else LAST if index == count - 1 else MIDDLE


def _header(path, offset, header) -> tuple[int, int]:
    """Returns the length and the continuation flag of the part at an offset."""
    if len(header) != 8 or header[:4] != MAGIC:
        raise ValueError(f"{path}: there is no RecordIO record at byte {offset}")
    word = struct.unpack("<I", header[4:])[0]
    return word & (1 << LENGTH_BITS) - 1, word >> LENGTH_BITS


def _parsed(stored: bytes, path, offset) -> tuple[bytes, int]:
    """Returns a record's data and its end in `path`. stored: begins with the record, which is at `offset` there."""
    parts = []
    start = 0
    while True:
        length, continuation = _header(path, offset + start, stored[start:start + 8])
        parts.append(stored[start + 8:start + 8 + length])
        if len(parts[-1]) != length:
            raise ValueError(f"{path} is truncated; it ends inside the record at byte {offset}")
        start += 8 + length + -length % 4
        if continuation in (COMPLETE, LAST):
            return MAGIC.join(parts), offset + start


def _write_index(path, offsets) -> None:
    write_atomically(path, "".join(f"{number}\t{offset}\n" for number, offset in enumerate(offsets)))
