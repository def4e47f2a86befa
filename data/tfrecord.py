"""TFRecord shards and the index that DALI reads beside each: a line `offset size` a record, in bytes."""
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

FRAMING = 16  # bytes a record beside its data: length 8, its checksum 4, the data's checksum 4


def index_path(path) -> Path:
    return Path(f"{path}.idx")


def write_shard(path, samples: Iterable[tuple[bytes, int]]) -> int:
    """Writes (encoded image, label) pairs as TFRecord with the usual features, and the index. Returns their number."""
    import tensorflow as tf

    count = 0
    with tf.io.TFRecordWriter(str(path)) as writer:
        for image, label in samples:
            features = {
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString(deterministic=True))
            count += 1
    write_index(index_path(path), scan(path))
    return count


def scan(path) -> np.ndarray:
    """The (offset, size) of each record in a shard, int64 (records, 2), by following the lengths.

    Raises ValueError where the file ends inside a record.
    """
    size, offset, entries = Path(path).stat().st_size, 0, []
    with open(path, "rb") as file:
        while offset < size:
            file.seek(offset)
            header = file.read(8)
            length = struct.unpack("<Q", header)[0] + FRAMING if len(header) == 8 else FRAMING
            if offset + length > size:
                raise ValueError(f"{path}: the file ends inside record {len(entries)}")
            entries.append((offset, length))
            offset += length
    return np.array(entries, np.int64).reshape(-1, 2)


def write_index(path, entries: np.ndarray) -> None:
    with open(path, "w") as file:
        file.writelines(f"{offset} {size}\n" for offset, size in entries.tolist())


def read_index(path) -> np.ndarray:
    """The (offset, size) of each record that an index names, int64 (records, 2). Raises ValueError if malformed."""
    try:
        return np.array(Path(path).read_bytes().split(), np.int64).reshape(-1, 2)
    except (ValueError, OverflowError):
        raise ValueError(f"{path}: not an index of 'offset size' lines") from None
