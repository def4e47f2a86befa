"""The order of samples: one endless stream, epoch 0's permutation, then epoch 1's, ... a function of the seed alone.

Where a run starts, what a worker reads, where a resumed run goes on: each is a piece of this stream. What the stream is
depends on what the format's DALI reader can follow.

Any order (TFRecord, folders): with one file a true global shuffle. With several, as the reader goes through its list of
files one by one, a shuffle of blocks, each of random records of one file, and a file stands in the list once for each
of its blocks. Each global batch is the next samples of the stream, whatever the number of workers.

File after file (LMDB, RecordIO): the files are shuffled, and their records come as they were written. Between two
evaluations each worker reads a piece of the stream of its own, so that all together read each sample once; which of
them meet in a batch depends on the number of workers.
"""
import numpy as np

from data.dataset import Split

BLOCK = 64  # samples; a smaller block shuffles better and opens files more often


def permutation(split: Split, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: each sample's number once, int64 (samples,)."""
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    any_order = split.kind.ANY_ORDER
    if len(split.paths) == 1:
        return random.permutation(split.samples) if any_order else np.arange(split.samples)
    blocks = []
    for start, end in zip(split.file_starts, split.file_starts[1:], strict=False):
        if any_order:
            shuffled = start + random.permutation(end - start)
            blocks += np.split(shuffled, range(BLOCK, len(shuffled), BLOCK))
        else:
            blocks.append(np.arange(start, end))
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


def worker_places(split: Split, steps: int, batch_size: int, shard: int, shards: int, neighbours: int = 1,
                  micro_batch_size: int = 1) -> np.ndarray:
    """Positions of a worker's samples within the next `steps` global batches, in reading order.

    int64 (steps * batch_size / shards,), from 0. neighbours: groups of so many workers interleave their micro-batches,
    so that what they process at the same time is adjacent in the global batch.
    """
    places = np.arange(steps * batch_size)
    if split.kind.ANY_ORDER:
        of_group = places.reshape(steps, shards // neighbours, -1)[:, shard // neighbours]
        return of_group.reshape(-1, neighbours, micro_batch_size if neighbours > 1 else of_group.shape[1])[
            :, shard % neighbours].reshape(-1)
    return places.reshape(shards, -1)[shard]


def contiguous_shard(samples: int, shard: int, shards: int) -> np.ndarray:
    """The samples of one of several nearly equal parts, int64; empty where there are more shards than samples."""
    return np.arange(samples * shard // shards, samples * (shard + 1) // shards)


def pieces(split: Split, samples: np.ndarray) -> list[tuple]:
    """Splits samples into runs within one file, for the reader: (path, index, sample numbers within the file), ..."""
    files = np.searchsorted(split.file_starts, samples, side="right") - 1
    cuts = np.diff(files, prepend=-1) != 0
    if not split.kind.ANY_ORDER:
        cuts |= np.diff(samples, prepend=-2) != 1
    starts = np.flatnonzero(cuts)
    return [(split.paths[file], split.entries[file], samples[start:end] - split.file_starts[file])
            for file, start, end in zip(files[starts], starts, [*starts[1:], len(samples)], strict=True)]
