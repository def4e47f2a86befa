"""The order of samples: one endless stream, epoch 0's permutation, then epoch 1's, ... a function of the seed alone.

Where a run starts, what a worker reads, where a resumed run goes on: each is a piece of this stream. DALI's TFRecord
reader follows an index whose lines are permuted, cut or repeated, so a piece of the stream is an index file. The
reader goes through its list of files one by one: with one file the order is a true global shuffle; with several it is
a shuffle of blocks, each of random records of one file, and a file stands in the list once for each of its blocks.
"""
from pathlib import Path

import numpy as np

from data import tfrecord
from data.dataset import Split

BLOCK = 64  # samples; a smaller block shuffles better and opens files more often


def permutation(split: Split, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: each sample's number once, int64 (samples,)."""
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    if len(split.paths) == 1:
        return random.permutation(split.samples)
    blocks = []
    for start, end in zip(split.file_starts, split.file_starts[1:], strict=False):
        shuffled = start + random.permutation(end - start)
        blocks += np.split(shuffled, range(BLOCK, len(shuffled), BLOCK))
    return np.concatenate([blocks[i] for i in random.permutation(len(blocks))])


def stream(split: Split, seed: int, position: int, count: int) -> np.ndarray:
    """The numbers of `count` samples of the endless stream from a position on, int64 (count,)."""
    pieces = []
    while count:
        epoch, offset = divmod(position, split.samples)
        piece = permutation(split, seed, epoch)[offset:offset + count]
        pieces.append(piece)
        position, count = position + len(piece), count - len(piece)
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


def worker_stream(split: Split, seed: int, position: int, steps: int, batch_size: int, shard: int,
                  shards: int) -> np.ndarray:
    """What one worker reads of `steps` global batches: its share of each, in turn, int64 (steps * batch / shards,).

    Each global batch is the next `batch_size` samples of the stream, whatever the number of shards.
    """
    batches = stream(split, seed, position, steps * batch_size).reshape(steps, shards, batch_size // shards)
    return batches[:, shard].reshape(-1)


def contiguous_shard(samples: int, shard: int, shards: int) -> np.ndarray:
    """The samples of one of several nearly equal parts, int64; empty where there are more shards than samples."""
    return np.arange(samples * shard // shards, samples * (shard + 1) // shards)


def write_indexes(split: Split, samples: np.ndarray, folder: Path) -> tuple[list[str], list[str]]:
    """Writes the index files with which DALI reads these samples in this order; returns (data files, index files)."""
    files = np.searchsorted(split.file_starts, samples, side="right") - 1
    starts = np.flatnonzero(np.diff(files, prepend=-1))
    paths, indexes = [], []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(samples)], strict=True)):
        index = folder / f"{number}.idx"
        tfrecord.write_index(index, split.index[samples[start:end]])
        paths.append(str(split.paths[files[start]]))
        indexes.append(str(index))
    return paths, indexes
