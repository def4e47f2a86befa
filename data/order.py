"""The order of samples: one endless stream of epoch 0's permutation, then epoch 1's, ..., a function of the seed alone.

Every run, every worker and every resumed run reads a slice of this stream.

Global order: A single file gets a true global shuffle. With several files, blocks are shuffled, because DALI goes
through its list of files one by one. Each block holds random records of one file, and a file is listed once for each of
its blocks. Each global batch holds the next samples of the stream, for any number of workers.

Global order in groups, for data that is fetched: A block is a run of consecutive records of a file, which one request
can fetch, and the same in all epochs, so that what was fetched can be kept. All blocks are shuffled, and then the
samples of each group of blocks.

Repeated augmentation (arXiv:1902.05509): An epoch has as many samples as without it, but takes each of the first ones
of its permutation several times. Copies alternate with those of the next sample, as a b a b a b, because neighbours are
mixed (mixing.py). Each copy has its own random numbers, which depend on its position.

File after file (--order=file, for LMDB and RecordIO): The files are shuffled, and their records keep the order in which
they were written. Each epoch is divided into one contiguous slice per worker. Together, the workers read each of its
samples once. Which samples share a batch depends on the number of workers.
"""
import numpy as np

from data.dataset import Split
from data.randomness import Purpose, philox

BLOCK = 64  # samples per block


def permutation(split: Split, seed: int, epoch: int, block: int = BLOCK, group: int = 0) -> np.ndarray:
    """Returns the order of one epoch: each sample number once, int64 (samples,).

    block: number of samples that are read from a file before the next. Smaller blocks shuffle better. group: number of
    blocks whose samples are shuffled together, each a run of consecutive samples of a file. 0: a block's samples are
    drawn from its whole file.
    """
    if group and split.any_order:
        return _in_groups(split, seed, epoch, block, group)
    random = np.random.Generator(philox(seed, Purpose.ORDER, epoch))
    sizes = np.diff(split.file_starts)
    if len(sizes) == 1:
        return random.permutation(split.samples) if split.any_order else np.arange(split.samples)
    if not split.any_order:
        return _concatenated(split.file_starts[:-1], sizes, random.permutation(len(sizes)))
    shuffled = np.concatenate([start + random.permutation(size)
                               for start, size in zip(split.file_starts, sizes, strict=False)])
    blocks = np.maximum(1, -(-sizes // block))  # of each file
    starts = block * _concatenated(0 * blocks, blocks, np.arange(len(blocks)))
    left = np.repeat(sizes, blocks) - starts
    return shuffled[_concatenated(starts + np.repeat(split.file_starts[:-1], blocks), np.minimum(left, block),
                                  random.permutation(len(starts)))]


def _in_groups(split, seed, epoch, block, group) -> np.ndarray:
    random = np.random.Generator(philox(seed, Purpose.GROUPS, epoch))
    starts = block_starts(split, block)
    chosen = block_order(split, seed, epoch, block)
    sizes = np.diff(starts, append=split.samples)
    groups = np.repeat(np.arange(len(chosen)) // group, sizes[chosen])
    return _concatenated(starts, sizes, chosen)[np.lexsort([random.random(split.samples), groups])]


def block_starts(split: Split, block: int) -> np.ndarray:
    """Returns the first sample of each block of a global order in groups, ascending, int64 (blocks,)."""
    sizes = np.diff(split.file_starts)
    blocks = -(-sizes // block)
    within = _concatenated(0 * blocks, blocks, np.arange(len(blocks)))
    return np.repeat(split.file_starts[:-1], blocks) + within * block


def block_order(split: Split, seed: int, epoch: int, block: int) -> np.ndarray:
    """Returns the numbers of the blocks in the order in which an epoch reads them, int64 (blocks,)."""
    random = np.random.Generator(philox(seed, Purpose.BLOCKS, epoch))
    return random.permutation(len(block_starts(split, block)))


def blocks_read(split: Split, seed: int, epoch: int, block: int, group: int, repeats: int) -> np.ndarray:
    """Returns the numbers of the blocks that an epoch reads, in this order, int64: all, or with repeats the first ones.

    group, repeats: of `stream`.
    """
    chosen = block_order(split, seed, epoch, block)
    ends = np.cumsum(np.diff(block_starts(split, block), append=split.samples)[chosen])
    blocks = np.searchsorted(ends, -(-split.samples // (2 * repeats)) * 2) + 1
    return chosen[:-(-blocks // group) * group]


def _concatenated(starts, sizes, chosen) -> np.ndarray:
    """Returns the concatenation of the ranges start, ..., start + size - 1, in the order `chosen`."""
    sizes = sizes[chosen]
    return np.arange(sizes.sum()) + np.repeat(starts[chosen] - np.cumsum(sizes) + sizes, sizes)


def stream(split: Split, seed: int, positions: np.ndarray, block: int = BLOCK, group: int = 0,
           repeats: int = 1) -> np.ndarray:
    """Returns the numbers of the samples at these positions of the endless stream, int64 (positions,).

    It works through one epoch after another, in memory for the samples of one. repeats: how often an epoch takes a
    sample. Two neighbours within an epoch are never the same sample.
    """
    epochs, offsets = np.divmod(positions, split.samples)
    offsets = offsets // (2 * repeats) * 2 + offsets % 2  # unchanged without repeats
    samples = np.empty(len(positions), np.int64)
    firsts = np.flatnonzero(np.diff(epochs, prepend=-1))
    for first, end in zip(firsts, [*firsts[1:], len(positions)], strict=False):
        samples[first:end] = permutation(split, seed, int(epochs[first]), block, group)[offsets[first:end]]
    return samples


def micro_batches(batch_size: int, micro_batch_size: int, shard: int, shards: int, neighbours: int = 1) -> range:
    """Returns a worker's micro-batches of each global batch. Some workers may have one more than others.

    neighbours: see worker_positions.
    """
    count = batch_size // micro_batch_size
    own = range(count * shard // shards, count * (shard + 1) // shards)
    if neighbours == 1:
        return own
    group, member = divmod(shard, neighbours)
    first = group * len(own) * neighbours + member
    return range(first, first + len(own) * neighbours, neighbours)


def worker_positions(split: Split, steps: int, batch_size: int, shard: int, shards: int, neighbours: int = 1,
                     micro_batch_size: int = 1) -> np.ndarray:
    """Returns the positions of a worker's samples within the next `steps` global batches, in reading order.

    Positions are int64 and count from 0. neighbours: number of workers that share batch norm's statistics. They take
    micro-batches in turn, so that the samples that they process at the same time are adjacent in the global batch;
    their number has to divide the number of workers, and all workers need the same number of micro-batches. Formats
    that are read file by file ignore it.
    """
    size = micro_batch_size
    own = micro_batches(batch_size, size, shard, shards, neighbours if split.any_order else 1)
    if not split.any_order:
        return size * steps * own.start + np.arange(size * steps * len(own))
    firsts = np.arange(steps)[:, None] * batch_size + np.array(own, np.int64) * size
    return (firsts[:, :, None] + np.arange(size)).reshape(-1)


def validation_shard(samples: int, batch_size: int, shard: int, shards: int) -> np.ndarray:
    """Returns a shard's samples of a validation split, int64: consecutive batches, the same for any number of shards.

    The last batch of the split may be smaller. A shard may have none.
    """
    batches = micro_batches(-(-samples // batch_size) * batch_size, batch_size, shard, shards)
    return np.arange(batches.start * batch_size, min(samples, batches.stop * batch_size))
