"""The step-time breakdown: waiting for data, exchanging gradients, and the rest, which is computing; and slow workers.

Waiting for data includes waiting for storage: until the spool has read or fetched the records that DALI decodes. The
latter is also measured separately, in all steps.

Data and exchange count only the time that the computation waits. Loading that overlaps the previous micro-batch and
exchange that overlaps the backward pass cost nothing. Waiting for a slower worker is part of the exchange.
arXiv:1811.05233 and the GTC slides call the fraction of the exchange synchronisation overhead.

At each update, all workers wait for the slowest one. Its own time, which is computing and waiting for data, is long,
and it hardly waits for the exchange. The others wait.
"""
import socket
from collections import Counter
from dataclasses import dataclass

import numpy as np

from common.activity import PARTS
from data.staging.spool import Admitted
from distributed.world import World
from training.clock import TIMED_ONE_IN

NOT_READ = Admitted()
READ = Admitted._fields
# Sums of a worker: the number of timed steps and their seconds, the sum of their squared own times (computing and
# waiting for data), the seconds of all steps, and what they read.
COLUMNS = ("steps", *PARTS, "squares", "trained", *READ)
LIMIT = 0.15  # of the median, by which the own time of a slow worker exceeds it
CERTAIN = 3.0  # standard errors, by which it does so at least
LEAST_STEPS = 4  # timed steps that are compared; evaluations with fewer between them are taken together


@dataclass(frozen=True)
class WorkerTimes:
    """Sums of all workers' seconds since they were last gathered."""

    hosts: list[str]  # by rank
    sums: np.ndarray  # float64 (workers, len(COLUMNS))

    def columns(self, *names: str) -> np.ndarray:
        """Returns some of COLUMNS, float64 (workers, names)."""
        return self.sums[:, [COLUMNS.index(name) for name in names]]

    @property
    def means(self) -> list[list[float]]:
        """Mean seconds of a timed step of each worker: computing, waiting for data, exchange."""
        return (self.columns(*PARTS) / np.maximum(1, self.columns("steps"))).tolist()


def timed_every(steps: int) -> int:
    """Returns n, if every n-th of these steps between two evaluations is timed: LEAST_STEPS of them, if there are."""
    return max(1, min(TIMED_ONE_IN, steps // LEAST_STEPS))


class StepTimes:
    """This worker's times and the images of all workers since the last `gather`."""

    def __init__(self):
        self._hosts = None
        self._reset()

    def _reset(self):
        self._images = 0
        self._own = Counter(dict.fromkeys(COLUMNS, 0.0))  # whose update() adds

    def add(self, images: int, seconds: float, admitted: Admitted = NOT_READ) -> None:
        """Adds a step, timed or not."""
        self._images += images
        self._own.update(trained=seconds, **admitted._asdict())

    def add_timed(self, seconds: float, waited) -> dict[str, float]:
        """Adds a timed step. waited: how many of these seconds it waited for each of WAITS. Returns the fractions."""
        data, exchange = map(float, waited)
        self._own.update(steps=1, compute=seconds - data - exchange, data=data, exchange=exchange,
                         squares=(seconds - exchange) ** 2)
        return {"data": data / seconds, "exchange": exchange / seconds}

    def images_per_second(self) -> float:
        return self._images / self._own["trained"] if self._images else 0.0

    def gather(self, world: World) -> WorkerTimes:
        """Returns the times of all workers, and resets. The workers have to be the same each time."""
        own = [*self._own.values()]
        self._reset()
        self._hosts = self._hosts or world.gather(socket.gethostname(), "hosts")
        return WorkerTimes(self._hosts, world.concatenate(np.array([own]), "times"))


def breakdown_of(workers: WorkerTimes) -> dict[str, float]:
    """Returns compute, data and exchange as fractions of the timed steps of all workers.

    The fractions add up to 1. The dict is empty if no step was timed. If data were read ahead by a spool, it also
    has the fraction of all steps that workers waited for it, storage, and the sums of the rest of Admitted.
    """
    sums = dict(zip(COLUMNS, workers.sums.sum(axis=0).tolist(), strict=True))
    seconds = sum(sums[name] for name in PARTS)
    if not seconds:
        return {}
    breakdown = {name: sums[name] / seconds for name in PARTS}
    storage, *traffic = READ
    if sums[storage]:
        breakdown["storage"] = sums[storage] / sums["trained"]
        breakdown |= {name: int(sums[name]) for name in traffic}
    return breakdown


class SlowWorkers:
    """Names workers that were slow in two consecutive comparisons between which the workers have not changed."""

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
