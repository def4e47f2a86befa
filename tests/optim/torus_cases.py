"""What each rank of test_torus.py does: random gradients over every grid and link, against sums in float64.

Every rank draws all ranks' gradients, so that the sums it expects have come over no wire.
"""
import json
import os
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from optim import exchange, grids
from optim.lars import SGD
from optim.torus import AllToAll, ProcessSets

WORKERS = int(os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
SHAPES = ((), (1,), (3, 3, 4, 5), (17,), (1000, 3), (2, 1), (129,))
ROWS = (23, 3)  # of a variable whose gradient is IndexedSlices


def drawn(rank: int, case: int):
    """One rank's gradients: of each shape, of very different sizes; and values and indices of slices, 0 to 5 rows."""
    random = np.random.default_rng([case, rank])
    dense = [(random.normal(size=shape) * 10.0 ** (3 * number - 9)).astype(np.float32)
             for number, shape in enumerate(SHAPES)]
    count = int(random.integers(0, 6)) if rank else 5
    return dense, random.normal(size=(count, ROWS[1])).astype(np.float32), random.integers(0, ROWS[0], count)


def expected(case: int):
    """The means over the ranks, in float64."""
    everyone = [drawn(rank, case) for rank in range(WORKERS)]
    table = np.zeros(ROWS)
    for _, values, indices in everyone:
        np.add.at(table, indices, values.astype(np.float64))
    return [np.mean([dense[number] for dense, _, _ in everyone], axis=0, dtype=np.float64)
            for number in range(len(SHAPES))] + [table / WORKERS]


def averages(case: int, links, compression: str, fusion_bytes: int):
    """What exchange.average gives, as arrays."""
    variables = [tf.Variable(np.zeros(shape, np.float32)) for shape in (*SHAPES, ROWS)]
    optimizer = exchange.distributed(SGD(0.0), compression, fusion_mb=fusion_bytes / 2**20)
    exchange.connect(optimizer, links)

    @tf.function
    def average(dense, values, indices):
        slices = tf.IndexedSlices(values, indices, tf.constant(ROWS, tf.int64))
        return [tf.convert_to_tensor(one) for one in exchange.average(optimizer, [*dense, slices], variables)]

    dense, values, indices = drawn(hvd.rank(), case)
    # The order of rows is left open by their number, which differs between ranks.
    given = [tf.constant(one) for one in dense], tf.constant(values), tf.constant(indices)
    return [one.numpy() for one in average(*given)]


def error(got, wanted) -> float:
    """The largest difference, in parts of the tensor's largest value."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, wanted, strict=True))


def main(everything: bool) -> dict:
    links = {grid: ProcessSets(*grid) for grid in grids.grids(WORKERS)}
    hvd.init(process_sets=[one for link in links.values() for one in link.process_sets])
    ways = {"ring": None} | {f"{x}x{y} sets": link for (x, y), link in links.items()}
    ways |= {f"{x}x{y} all-to-all": AllToAll(x, y) for x, y in links}
    errors = {}
    for case, (name, link) in enumerate(ways.items()):
        wanted = expected(case)
        for fusion_bytes in (2**20, 600) if everything else (600,):
            errors[f"{name} {fusion_bytes}"] = error(averages(case, link, "none", fusion_bytes), wanted)
        half = averages(case, link, "fp16", 600)
        errors[f"{name} fp16"] = error(half, wanted)
        if case % 2:
            again = averages(case, link, "fp16", 600)
            errors[f"{name} again"] = sum(a.tobytes() != b.tobytes() for a, b in zip(half, again, strict=True))
    return {"errors": errors, "digest": hash(tuple(one.tobytes() for one in half))}


if __name__ == "__main__":
    result = main(everything="short" not in sys.argv)
    everyone = hvd.allgather_object(result["errors"])
    if hvd.rank() == 0:
        print(json.dumps(everyone))
    hvd.shutdown()
