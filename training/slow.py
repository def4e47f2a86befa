"""Slow workers: at each update, all workers wait for the slowest one.

Its own time, which is computing and waiting for data, is long, and it hardly waits for the exchange. The others wait.
"""
import numpy as np

from training.breakdown import WorkerTimes

LIMIT = 0.15  # of the median, by which the own time of a slow worker exceeds it
CERTAIN = 3.0  # standard errors, by which it does so at least
LEAST_STEPS = 4  # timed steps that are compared; evaluations with fewer between them are taken together


class SlowWorkers:
    """Names workers that were slow in two comparisons running. Elastic training forgets the first when workers change.
    """

    def __init__(self):
        self._hosts = None

    def add(self, workers: WorkerTimes, micro_batches: list[int]) -> list[str]:
        """Compares the workers if enough steps were timed. Returns a sentence on each slow one.

        micro_batches: number in a global batch, by rank. Only workers with the same number are compared.
        """
        if workers.hosts != self._hosts:
            self._hosts = workers.hosts
            self._sums = 0.0
            self._before = {}
        self._sums += workers.columns("steps", "compute", "data", "squares")
        if self._sums[:, 0].min() < LEAST_STEPS:
            return []
        before = self._before
        self._before = self._compare(np.array(micro_batches))
        self._sums = 0.0
        return [sentence for rank, sentence in self._before.items() if rank in before]

    def _compare(self, micro_batches: np.ndarray) -> dict[int, str]:
        """Returns rank -> sentence for the workers that are slow now."""
        steps, slow = self._sums[:, 0], {}
        compute, data, squares = self._sums[:, 1:].T / steps
        own = compute + data
        errors = np.sqrt(np.maximum(0.0, squares - own ** 2) / (steps - 1))
        table = np.stack([compute, data, own, errors], axis=1)
        for number in np.unique(micro_batches):
            peers = np.flatnonzero(micro_batches == number)
            median = np.quantile(table[peers], 0.5, axis=0, method="lower")  # of two workers, the faster one
            for rank in peers:
                *more, excess, _ = table[rank] - median
                if excess > max(LIMIT * median[2], CERTAIN * errors[rank], CERTAIN * median[3]):
                    slow[int(rank)] = self._sentence(rank, more[0] / median[0], *more, excess)
        return slow

    def _sentence(self, rank: int, slower: float, compute: float, data: float, excess: float) -> str:
        """Says how a worker differs from the median. slower: a fraction. Times are in seconds a step."""
        does = f"computes {slower:.0%} slower" if compute > data else f"waits {1000 * data:.3g} ms longer for data"
        return (f"rank {rank} on {self._hosts[rank]} {does} than the median: the others wait {1000 * excess:.3g} ms of "
                "each step for it")
