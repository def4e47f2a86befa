"""Checks that all workers hold the same state, and that it is finite, before damage is saved unnoticed.

Tensors have a checksum of 64 bits: the sum, modulo 2^64, of each value's bits times an odd number of its position. Sums
of integers have no order, so it does not depend on threads or devices. An odd number times a single flipped bit is not
0 modulo 2^64, so every flipped bit changes the checksum. So do values that change places.
"""
import functools
import itertools
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from common.errors import listed
from distributed.world import World

SLICE = 2**20  # values that become int64 at once: a large layer as int64 would take gigabytes
INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # by size in bytes
GROUPS = ("model/", "ema/")  # in which no number is infinite or NaN
MOST_RANKS = 8  # ranks in a message
DIFFER = "differ from"  # in the message about a state that differs


def checksum(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the checksum of the tensors' values, int64 (), computed where they are.

    Positions are counted on over all tensors. Shapes and names have no influence.
    """
    total, position = tf.zeros([], tf.int64), 0
    for values in _slices(tensors):
        bits = tf.cast(tf.bitcast(values, INTEGERS[values.dtype.size]), tf.int64)
        total += tf.reduce_sum(bits * (_odd_numbers()[:bits.shape[0]] + 2 * position))
        position += bits.shape[0]
    return total


def _slices(tensors) -> Iterator[tf.Tensor]:
    """Yields all values in order, as vectors of one dtype with at most SLICE values."""
    held, size = [], 0
    for tensor in tensors:
        flat = tf.reshape(tensor, [-1])
        for start in range(0, flat.shape[0], SLICE):
            part = flat if flat.shape[0] <= SLICE else flat[start:start + SLICE]
            if held and (size + part.shape[0] > SLICE or part.dtype != held[0].dtype):
                yield tf.concat(held, axis=0)
                held, size = [], 0
            held.append(part)
            size += part.shape[0]
    if held:
        yield tf.concat(held, axis=0)


@functools.cache
def _odd_numbers() -> tf.Tensor:
    return tf.range(1, 2 * SLICE, 2, tf.int64)


def checksums(tensors: Mapping[str, tf.Tensor]) -> dict[str, int]:
    """Returns the checksum of each group, such as `model`. tensors: by name, GROUP/NAME, groups one after another."""
    return {group: int(checksum([tensors[name] for name in names]))
            for group, names in itertools.groupby(tensors, key=lambda name: name.partition("/")[0])}


def not_finite(tensors: Mapping[str, tf.Tensor]) -> str | None:
    """Returns the name of the first infinite or NaN variable among the weights, batch norm's statistics, and averages.
    """
    names = [name for name, tensor in tensors.items() if name.startswith(GROUPS) and tensor.dtype.is_floating]
    are_finite = tf.stack([tf.reduce_all(tf.math.is_finite(tensors[name])) for name in names]).numpy()
    return next((name for name, is_finite in zip(names, are_finite, strict=True) if not is_finite), None)


def in_hexadecimal(number: int) -> str:
    """Returns a checksum as 16 hexadecimal digits."""
    return f"{number % 2**64:016x}"


def difference(world: World, tensors: Mapping[str, tf.Tensor]) -> str:
    """Returns which ranks hold other values than most, if most agree, and in which tensors.

    Collective: every rank must call it.
    """
    own = tuple(int(checksum([tensor])) for tensor in tensors.values())
    everyone = world.gather((socket.gethostname(), own), "difference")
    [(usual, count)] = Counter(checksums for _, checksums in everyone).most_common(1)
    others = [(rank, host) for rank, (host, checksums) in enumerate(everyone) if checksums != usual]
    is_majority = 2 * count > world.size  # a tie does not say who is wrong
    shown = others if is_majority else [(rank, host) for rank, (host, _) in enumerate(everyone)]
    ranks = listed([f"rank {rank} on {host}" for rank, host in shown], MOST_RANKS, what="ranks")
    names = [name for name, *values in zip(tensors, *(checksums for _, checksums in everyone), strict=True)
             if len({*values}) > 1]
    whom = f"those of {count} workers" if is_majority else "each other"
    return f"the weights of {ranks} {DIFFER} {whom}: {listed(names, 1, what='variables')}"
