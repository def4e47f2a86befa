"""Measures a peer of benchmarks.input_pipeline: a process that runs only in its turns."""
import sys
import time
from collections.abc import Callable

WARM = 1.0  # seconds of each turn before the measured ones, so that batches already in the queues do not count


def serve(batch: Callable[[], object], batch_size: int) -> None:
    """Prints `ready`, then answers each line of standard input, a number of seconds.

    The answer is images per second, and the number of images of the whole turn. batch: returns the next batch.
    Measurements start and end with a batch, so that only whole batches count.
    """
    batch()
    print("ready", flush=True)
    for line in sys.stdin:
        warm = _run(batch, WARM)
        begun = time.perf_counter()
        count = _run(batch, float(line))
        rate = count * batch_size / (time.perf_counter() - begun)
        print(rate, (warm + count) * batch_size, flush=True)


def _run(batch, seconds) -> int:
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        batch()
        count += 1
    return count
