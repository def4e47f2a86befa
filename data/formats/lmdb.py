"""LMDB with Caffe's Datum, as Caffe's convert_imageset --encoded writes it: a folder with data.mdb.

The keys are as Caffe's: the sample number in eight digits, "_" and the name of the image's file, if there is one.
Samples are numbered in the order of their keys.
"""
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from data.formats import messages, sequential

SUFFIX = ".lmdb"
ANY_ORDER = False
MAP_SIZE = 1 << 40  # maximum size in bytes; reserves addresses, not disk space
BATCH = 256  # samples per transaction
KEY_SIZE = 511  # bytes of a key, at most
FULL = 1 << 20  # free bytes below which a disk counts as full


def index_path(path) -> None:
    return None


def write(path, samples: Iterable[tuple]) -> None:
    import lmdb

    with lmdb.open(str(path), map_size=MAP_SIZE, lock=False, sync=False) as database:
        try:
            transaction = database.begin(write=True)
            for number, (image, label, *name) in enumerate(samples):
                transaction.put(_key(number, *name), messages.datum(image, label), append=True)
                if number % BATCH == BATCH - 1:
                    transaction.commit()
                    transaction = database.begin(write=True)
            transaction.commit()
            database.sync(True)
        except lmdb.Error:  # LMDB reports a full disk as an I/O error
            if shutil.disk_usage(path).free < FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
            raise


def read_index(path) -> np.ndarray:
    """Returns (key, size of its value in bytes) of each sample. Reads the pages of the keys, not the values."""
    import lmdb

    try:
        with _opened(path) as database:
            used = (database.info()["last_pgno"] + 1) * database.stat()["psize"]
            if (size := (Path(path) / "data.mdb").stat().st_size) < used:
                raise ValueError(f"{path}/data.mdb is truncated; it has {size} of {used} bytes")
            with database.begin(buffers=True) as transaction:
                entries = [(bytes(key), len(value)) for key, value in transaction.cursor()]
            longest = max((len(key) for key, _ in entries), default=1)
            return np.array(entries, [("key", f"S{longest}"), ("size", np.int64)])
    except lmdb.Error as error:
        raise ValueError(f"{path}: {error}") from None


def source_name(path, index: np.ndarray, sample: int) -> str | None:
    return index["key"][sample].partition(b"_")[2].decode(errors="surrogateescape") or None


def stored_sizes(index: np.ndarray) -> np.ndarray:
    return index["size"]


def records(path, index, samples) -> Iterator[tuple[bytes, int]]:
    """Raises ValueError if a value is missing or not a Datum with an encoded image."""
    with _opened(path) as database, database.begin(buffers=True) as transaction:
        for key in index["key"][samples].tolist():
            try:
                yield messages.read_datum(transaction.get(key, b""))
            except ValueError as error:
                raise ValueError(f"{path}: the value of key {key!r} {error}") from None


def reader(slices, scratch: Path, **options):
    arguments = sequential.reader_arguments(slices) | options

    def read():
        from nvidia.dali import fn

        return sequential.labelled(*fn.readers.caffe(**arguments))

    return read


def _key(number: int, name: str | None = None) -> bytes:
    key = b"%08d" % number
    return key if name is None else (key + b"_" + name.encode(errors="surrogateescape"))[:KEY_SIZE]


def _opened(path):
    import lmdb

    if not (Path(path) / "data.mdb").is_file():
        raise FileNotFoundError(f"{path} contains no data.mdb")
    return lmdb.open(str(path), readonly=True, lock=False, readahead=False)
