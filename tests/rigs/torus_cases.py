"""What each rank of test_torus.py does: random gradients over every grid, against means in float64.

A grid with rows and columns is also that of a hierarchical all-reduce, whose nodes are the rows.

Every rank makes all ranks' gradients, so that the means it expects have not been exchanged.
"""
import hashlib
import json
import os
import sys
from copy import copy

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from distributed.exchange import GradientExchange, Ring
from distributed.float16 import initial_scales
from distributed.hierarchical import Hierarchical
from distributed.neighbours import distinct
from distributed.optimizer import build, wrap
from distributed.torus import AllToAll, ProcessSets
from optim.lars import SGD
from plan import grids
from training.step import average

WORKERS = int(os.environ.get("HOROVOD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
SHAPES = ((), (1,), (3, 3, 4, 5), (17,), (1000, 3), (2, 1), (129,))
TABLE = (23, 3)  # the shape of a variable whose gradient is IndexedSlices
FUSION_MB = 600 / 2**20  # several buckets, some of a single gradient that is larger


def gradients_of(rank: int, case: int):
    """One rank's gradients, of sizes from 1e-9 to 1e9, and values and indices of slices: 0 to 5 rows."""
    random = np.random.default_rng([case, rank])
    dense = [(random.normal(size=shape) * 10.0 ** (3 * number - 9)).astype(np.float32)
             for number, shape in enumerate(SHAPES)]
    count = int(random.integers(0, 6)) if rank else 5
    return dense, random.normal(size=(count, TABLE[1])).astype(np.float32), random.integers(0, TABLE[0], count)


def expected(case: int) -> tuple[list, list]:
    """The means over the ranks, in float64; of each tensor, the largest value that any rank has."""
    everyone = [gradients_of(rank, case) for rank in range(WORKERS)]
    table = np.zeros(TABLE)
    for _, values, indices in everyone:
        np.add.at(table, indices, values.astype(np.float64))
    stacked = [np.stack(one).astype(np.float64) for one in zip(*(dense for dense, _, _ in everyone), strict=True)]
    return ([one.mean(axis=0) for one in stacked] + [table / WORKERS],
            [np.abs(one).max() for one in (*stacked, np.concatenate([values for _, values, _ in everyone]))])


class Named:
    """Collectives whose messages have names of their own: Horovod fails if a name comes with another operation."""

    def __init__(self, collectives, name: str):
        self._collectives, self._name = collectives or Ring(), name.replace(" ", "_")
        self.least_buckets = self._collectives.least_buckets

    def sum(self, tensors, compression, name):
        return self._collectives.sum(tensors, compression, f"{self._name}_{name}")


def averaging(collectives, compression: str):
    """A compiled function of (dense gradients, values, indices of the slices): what the optimizer's exchange gives."""
    optimizer, exchange = wrap(SGD(0.0)), GradientExchange(collectives, compression, FUSION_MB)
    variables = [tf.Variable(tf.zeros(shape)) for shape in (*SHAPES, TABLE)]
    build(optimizer, variables)
    exchange.scales = initial_scales(len(variables))

    @tf.function(reduce_retracing=True, autograph=False)
    def averaged(dense, values, indices):
        slices = tf.IndexedSlices(values, indices, tf.constant(TABLE, tf.int64))
        means, _ = average(exchange, optimizer, [*dense, slices], variables, hvd.size())
        return [tf.convert_to_tensor(mean.value) for mean in means]

    return lambda dense, values, indices: [one.numpy() for one in averaged(
        [tf.constant(one) for one in dense], tf.constant(values), tf.constant(indices))]


def error(got, wanted, largest) -> float:
    """The largest difference, in parts of the largest value that was summed: sums can cancel."""
    return max(float(np.abs(a - b).max() / most) for a, b, most in zip(got, wanted, largest, strict=True))


def half_precision(average) -> dict:
    """What becomes of infinity and NaN on one rank each, and of values whose sum float16 cannot hold."""
    zeros = [np.zeros(shape, np.float32) for shape in SHAPES]
    values, indices = np.zeros((1, TABLE[1]), np.float32), np.array([0])
    rank = hvd.rank()
    zeros[2] += 3e38 / 2 ** (WORKERS - 1).bit_length()  # the sum itself is still a float32
    zeros[3] += 1e-25
    for _ in range(2):  # the second time with scales that fit
        *_, large, small, _, _, _, _ = average(zeros, values, indices)
    found = {"large": float(np.abs(large / zeros[2] - 1).max()), "small": float(np.abs(small / zeros[3] - 1).max())}
    zeros[4][500, 0] = np.inf if rank == WORKERS - 1 else 1.0
    zeros[4][501, 0] = -np.inf if rank == 0 else 1.0
    zeros[6][5] = np.nan if rank == WORKERS // 2 else 1.0
    *_, infinite, _, undefined, _ = average(zeros, values, indices)
    return found | {
            "infinite": [str(value) for value in infinite[500:502, 0]] + [int(np.isfinite(infinite).sum())],
            "undefined": [bool(np.isnan(undefined[5])), int(np.isfinite(undefined).sum())]}


def gathered(collectives) -> list:
    """A sum, and what all ranks have of a tensor that rank 0 computes from it; the others have constant zeros."""
    exchange = GradientExchange(collectives)
    exchange.scales = initial_scales(1)

    @tf.function(autograph=False)
    def shared(number):
        [total] = exchange.sum([tf.fill([3], number)], "before")
        return total, *exchange.gathered([total * total if hvd.rank() == 0 else tf.zeros([3])])

    return [[one.numpy().tolist() for one in shared(tf.constant(number))] for number in (1.0, 2.0)]


def main(brief: bool, others: bool) -> dict:
    """brief: no more than the torus in float32. others: also by what elastic workers and NCCL have."""
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"  # as --deterministic: the same sums in the same order
    every = grids.grids(WORKERS) if WORKERS > 1 else []
    process_sets = {f"{x}x{y}": ProcessSets(x, y) for x, y in every}
    hierarchical = {f"hierarchical {x}x{y}": Hierarchical(x, y) for x, y in every if 1 not in (x, y)}
    made = process_sets | hierarchical
    hvd.init(process_sets=distinct(*(collectives.process_sets for collectives in made.values())))
    exchanges = dict(process_sets) if brief else {"ring": None} | made
    if others:
        exchanges |= {f"{x}x{y} all-to-all": AllToAll(x, y) for x, y in every}
        # Process sets are made only once.
        exchanges |= {f"{name} rings": copy(collectives) for name, collectives in process_sets.items()}
        for name in process_sets:
            exchanges[f"{name} rings"].rings = True
    found = {}
    for case, (name, collectives) in enumerate(exchanges.items()):
        collectives = Named(collectives, name)
        wanted, given = expected(case), gradients_of(hvd.rank(), case)
        got = averaging(collectives, "none")(*given)
        found[name] = {"error": error(got, *wanted)}
        if not brief:
            average = averaging(collectives, "fp16")
            first, half, again = (average(*given) for _ in range(3))  # the first in float32
            found[name] |= {"first": error(first, *wanted), "fp16": error(half, *wanted), **half_precision(average),
                            "again": all(a.tobytes() == b.tobytes() for a, b in zip(half, again, strict=True))}
            got += half
        found[name]["digest"] = hashlib.sha256(b"".join(one.tobytes() for one in got)).hexdigest()
        ours = [tf.fill([3], tf.cast(1e6 + hvd.rank(), kind)) for kind in (tf.float32, tf.float64)] + [tf.ones([2, 1])]
        sums = GradientExchange(collectives, "fp16").sum(ours, "statistics")
        found[name]["statistics"] = [(one / hvd.size()).numpy().tolist() for one in sums]
        found[name]["gathered"] = gathered(collectives)
    return found


if __name__ == "__main__":
    tf.get_logger().setLevel("ERROR")
    everyone = hvd.allgather_object(main("brief" in sys.argv, "others" in sys.argv))
    if hvd.rank() == 0:
        print(json.dumps(everyone))
