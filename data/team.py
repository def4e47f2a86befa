"""Splits work among the processes that mpirun started. An error on one rank ends all ranks with the same one line.

Ranks report to rank 0 between two samples. No rank waits for another while there is work, and all ranks learn of an
error within a sample's time.
"""
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from common.errors import UserError, complain, one_line
from common.startup import startup

LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")  # every MPI launcher sets one of these
PROGRAM = "data.prepare"
REPORT, OUTCOME = 1, 2  # message tags: to rank 0; from rank 0
EVERY = 0.2  # seconds between two reports of a rank
PATIENCE = 20  # seconds in which the other ranks have to stop


class _Stopped(Exception):
    """Another rank has failed."""


class Team:
    """The ranks of a run.

    A process without a launcher, or with `single_process`, is rank 0 of 1 and does not load MPI.
    """

    def __init__(self, single_process: bool = False):
        self.comm = None
        if not single_process and any(name in os.environ for name in LAUNCHED):
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
        self._unresponsive = set()  # ranks that did not stop when told to

    @property
    def rank(self) -> int:
        return self.comm.rank if self.comm else 0

    @property
    def size(self) -> int:
        return self.comm.size if self.comm else 1

    def log(self, line: str) -> None:
        """Prints a line on standard error, on rank 0 only."""
        if self.rank == 0:
            complain(line, PROGRAM)

    def abort(self, line: str) -> None:
        """Ends every rank because of an error that may be on this rank only."""
        complain(line, PROGRAM)
        if self.size > 1:
            self.comm.Abort(1)

    def on_rank_0(self, action: Callable):
        """Runs the action on rank 0 and returns its result on every rank."""
        outcome = _attempt(action) if self.rank == 0 else None
        return _settle([self.comm.bcast(outcome) if self.size > 1 else outcome])[0]

    def map(self, items: list, function: Callable) -> list:
        """Applies the function to every item, each on one rank. Returns all results, in order, on every rank."""
        mine = _attempt(lambda: [function(item) for item in items[self.rank::self.size]])
        parts = _settle(self.comm.allgather(mine) if self.size > 1 else [mine])
        return [parts[number % self.size][number // self.size] for number in range(len(items))]

    def work(self, units: Iterable, function: Callable, claim: Callable | None = None, bar=None) -> list:
        """Returns each unit's result in order on rank 0, and an empty list on the other ranks.

        The rank that claims a unit works on it. Without `claim`, the ranks take turns. The function calls `beat`
        regularly. bar: shows the samples that all ranks have reported, on rank 0 (has `update`).
        """
        self._reported, self._next, self._bar, self._line = 0, 0.0, bar, None
        self._ended = {0: []}
        results, line = [], None
        try:
            for number, unit in enumerate(units):
                if claim(unit) if claim else number % self.size == self.rank:
                    results.append((number, function(unit)))
        except _Stopped:
            pass
        except Exception as error:  # of any type: the other ranks must not wait for this one
            line = error_message(error)
        return self._finish_on_rank_0(results, line) if self.rank == 0 else self._finish_on_other_rank(results, line)

    def beat(self, samples: int) -> None:
        """Reports finished samples, and checks whether the work continues. It is cheap and should be called often."""
        self._reported += samples
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        if self.rank == 0:
            self._flush()
            self._listen()
            if self._line:
                raise _Stopped
        else:
            self.comm.send(("samples", self._reported), 0, REPORT)
            self._reported = 0
            if self.comm.iprobe(source=0, tag=OUTCOME):
                raise _Stopped

    def barrier(self) -> None:
        """Barrier before exit with an error, because a launcher kills all ranks when one exits.

        If some ranks hang, all ranks are ended instead, because the launcher would wait for the hanging ones.
        """
        if self._unresponsive:
            self.comm.Abort(1)
        elif self.size > 1:
            self.comm.Barrier()

    def _flush(self):
        if self._bar is not None:
            self._bar.update(self._reported)
        self._reported = 0

    def _listen(self):
        """Receives what the other ranks have sent, on rank 0."""
        if self.comm is None:
            return
        from mpi4py import MPI

        sender = MPI.Status()
        while self.comm.iprobe(tag=REPORT, status=sender):
            kind, content = self.comm.recv(source=sender.source, tag=REPORT)
            if kind == "samples":
                self._reported += content
                self._flush()
            else:
                results, line = content
                self._ended[sender.source] = results
                if line:
                    self._fail(line)

    def _fail(self, line):
        if not self._line:
            self._line = line
            self._send_outcome(line)

    def _send_outcome(self, line):
        for rank in range(1, self.size):
            self.comm.send(line, rank, OUTCOME)

    def _finish_on_rank_0(self, results, line) -> list:
        self._flush()
        self._ended[0] = results
        if line:
            self._fail(line)
        deadline = None
        while len(self._ended) < self.size:
            self._listen()
            if self._line:
                deadline = deadline or time.monotonic() + PATIENCE
                if time.monotonic() > deadline:
                    self._unresponsive = set(range(self.size)) - set(self._ended)
                    break
            time.sleep(0.01)
        if self._line:
            raise UserError(self._line, on_all_ranks=True)
        self._send_outcome(None)
        return [result for _, result in sorted(chain(*self._ended.values()), key=lambda pair: pair[0])]

    def _finish_on_other_rank(self, results, line) -> list:
        self.comm.send(("samples", self._reported), 0, REPORT)
        self.comm.send(("end", (results, line)), 0, REPORT)
        while not self.comm.iprobe(source=0, tag=OUTCOME):
            time.sleep(0.01)  # a blocking receive would spin and take a core from the working ranks
        if outcome := self.comm.recv(source=0, tag=OUTCOME):
            raise UserError(outcome, on_all_ranks=True)
        return []


def claims(folder: Path) -> Callable[[str], bool]:
    """Returns a function that claims a unit by creating a file of its name. The first rank to do so gets the unit.

    This balances ranks of any speed, on any shared disk.
    """
    def claim(unit) -> bool:
        try:
            os.close(os.open(folder / str(unit), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    return claim


@contextmanager
def progress(team, samples):
    """Shows a bar with rate and remaining time on rank 0.

    The bar appears after a delay. It is updated rarely if standard error is not a terminal.
    """
    if team.rank or not samples or startup.is_silent:
        yield None
        return
    from tqdm import tqdm

    interval = 0.5 if sys.stderr.isatty() else 10
    with tqdm(total=samples, unit=" images", delay=2, mininterval=interval, leave=False) as bar:
        yield bar


def error_message(error: Exception) -> str:
    """Returns what to tell the user about an error of any type."""
    known = isinstance(error, UserError | OSError | ValueError) or "No space left" in str(error)
    return one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"


def _attempt(action) -> tuple:
    try:
        return action(), None
    except Exception as error:  # of any type: the other ranks must not wait for this one
        return None, error_message(error)


def _settle(outcomes) -> list:
    """Returns the results, or raises the first error among them, which is the same on every rank."""
    for _, line in outcomes:
        if line:
            raise UserError(line, on_all_ranks=True)
    return [result for result, _ in outcomes]
