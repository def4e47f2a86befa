"""Whether all workers have the same weights. A fault in a worker's memory would otherwise go unnoticed.

A worker's weights are one number of 36 bits, the weighted sum of their bits. Its digits and their squares are added
over the workers in the message that an update sends anyway. The digits are equal on all n workers if and only if the
square of each sum is n times the sum of the squares (Cauchy and Schwarz), so every worker reaches the same verdict. A
digit has 6 bits, so that float32 adds the squares of 4,096 workers exactly.
"""
import hashlib
import socket
from collections import Counter

import numpy as np
import tensorflow as tf

from distributed.world import World
from optim.stacks import stacked, stacks_of

DIGITS, BITS = 6, 6
MOST_WORKERS = 2 ** 24 // (2 ** BITS - 1) ** 2  # whose squares float32 adds exactly
SHOWN = 8  # ranks in a message
DIFFER = "differ from those of"  # in the message about weights that differ


def digits(variables, is_checked: tf.Tensor) -> tf.Tensor:
    """Returns a worker's digits and their squares, to be added over the workers, float32 (2 * DIGITS,).

    is_checked: bool, on the host. If it is false, nothing is computed, and all are 0. Each weight's bits are multiplied
    by an odd number of its variable, so that no flipped bit is lost, and equal changes of two variables do not cancel.
    """
    @tf.function(autograph=False)
    def one_in_many():
        stacks = stacks_of(variables)
        rows = [tf.reshape(one, [1, -1]) if stack.is_single else one
                for stack, one in zip(stacks, stacked(stacks, variables), strict=True)]
        sums = tf.concat([tf.reduce_sum(tf.cast(tf.bitcast(one, tf.int32), tf.int64), axis=1) for one in rows], axis=0)
        total = tf.reduce_sum(sums * np.arange(1, 2 * len(variables), 2))
        found = tf.bitwise.bitwise_and(tf.bitwise.right_shift(total, BITS * np.arange(DIGITS)), 2 ** BITS - 1)
        return tf.cast(tf.concat([found, found ** 2], axis=0), tf.float32)

    return tf.cond(is_checked, one_in_many, lambda: tf.zeros(2 * DIGITS))


def differ(sums: np.ndarray, workers: int) -> bool:
    """Whether the workers' weights differ. sums: of `digits` over the workers, on the host."""
    found, squares = np.split(sums.astype(np.int64), 2)
    return workers <= MOST_WORKERS and bool(np.any(found ** 2 != workers * squares))


def differing_weights(world: World, weights: dict[str, tf.Variable]) -> str:
    """Returns which ranks have other weights than most, and in which variables. All ranks have to call it."""
    own = tuple(hashlib.blake2b(variable.numpy().tobytes(), digest_size=8).digest() for variable in weights.values())
    everyone = world.gather((socket.gethostname(), own), "differing weights")
    [(usual, count)] = Counter(digests for _, digests in everyone).most_common(1)
    others = [(rank, host, digests) for rank, (host, digests) in enumerate(everyone) if digests != usual]
    names = [name for name, *found in zip(weights, usual, *(digests for *_, digests in others), strict=True)
             if len({*found}) > 1]
    ranks = ", ".join(f"rank {rank} on {host}" for rank, host, _ in others[:SHOWN])
    more = f" and {len(others) - SHOWN} more ranks" if len(others) > SHOWN else ""
    listed = names[0] + (f" and {len(names) - 1} more variables" if len(names) > 1 else "")
    return f"the weights of {ranks}{more} {DIFFER} {count} workers: {listed}"
