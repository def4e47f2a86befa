"""LMDB with Caffe2's TensorProtos: an encoded image and a label."""
from collections.abc import Iterable, Iterator
from pathlib import Path

from data.formats import lmdb, messages, sequential

SUFFIX, ANY_ORDER = lmdb.SUFFIX, lmdb.ANY_ORDER
index_path, make_index = lmdb.index_path, lmdb.make_index
read_index, stored_sizes = lmdb.read_index, lmdb.stored_sizes


def write(path, samples: Iterable[tuple[bytes, int]]) -> None:
    lmdb.write_values(path, (messages.tensors(image, label) for image, label in samples))


def records(path, index, samples) -> Iterator[tuple[bytes, int]]:
    """Raises ValueError if a value is not TensorProtos of an image and a label."""
    return lmdb.read_values(path, index, samples, messages.read_tensors)


def reader(slices, scratch: Path, **options):
    arguments = sequential.reader_arguments(slices) | options

    def read():
        from nvidia.dali import fn

        return sequential.labelled(*fn.readers.caffe2(**arguments))

    return read
