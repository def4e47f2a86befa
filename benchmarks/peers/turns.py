"""How a peer of benchmarks.input_pipeline is measured: a process that waits until it is told to have its turn."""
import sys
import time
from collections.abc import Callable

WARM = 1.0  # seconds of each turn before the measured ones: queues that were full are not counted as work


def serve(batch: Callable[[], object], batch_size: int) -> None:
    """Says `ready`; then for each line of standard input, a number of seconds, says how many images per second.

    batch: gives the next batch. From batch to batch, so that what is measured is whole ones.
    """
    batch()
    print("ready", flush=True)
    for line in sys.stdin:
        _run(batch, WARM)
        begun = time.perf_counter()
        count = _run(batch, float(line))
        print(count * batch_size / (time.perf_counter() - begun), flush=True)


def _run(batch, seconds) -> int:
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        batch()
        count += 1
    return count
