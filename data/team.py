"""Work shared over the processes that mpirun started. What fails on one rank ends all of them with the same one line.

Ranks talk to rank 0 between two samples, so no rank waits for another while there is work, and an error is known
everywhere within a sample's time.
"""
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from common.errors import UserError, complain, one_line

LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")  # a launcher that speaks MPI has set one of them
PROGRAM = "data.prepare"
REPORT, OUTCOME = 1, 2  # tags: to rank 0; from rank 0
EVERY = 0.2  # seconds between two reports of a rank
PATIENCE = 20  # seconds that the others have to stop in


class _Stopped(Exception):
    """Another rank has failed."""


class Team:
    """The ranks of a run. A process that no launcher started, or that works alone, is rank 0 of 1 and loads no MPI."""

    def __init__(self, alone: bool = False):
        self.comm = None
        if not alone and any(name in os.environ for name in LAUNCHED):
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
        self._silent = set()  # ranks that did not stop when they were told to

    @property
    def rank(self) -> int:
        return self.comm.rank if self.comm else 0

    @property
    def size(self) -> int:
        return self.comm.size if self.comm else 1

    def say(self, line: str) -> None:
        """A line on standard error, once."""
        if self.rank == 0:
            complain(line, PROGRAM)

    def abort(self, line: str) -> None:
        """Ends every rank, for an error that only this one may have."""
        complain(line, PROGRAM)
        if self.size > 1:
            self.comm.Abort(1)

    def first(self, action: Callable):
        """What the action returns on rank 0, on every rank."""
        outcome = _attempt(action) if self.rank == 0 else None
        return _settle([self.comm.bcast(outcome) if self.size > 1 else outcome])[0]

    def share(self, items: list, function: Callable) -> list:
        """The function of every item, each computed by one rank; all of them, in order, on every rank."""
        mine = _attempt(lambda: [function(item) for item in items[self.rank::self.size]])
        parts = _settle(self.comm.allgather(mine) if self.size > 1 else [mine])
        return [parts[number % self.size][number // self.size] for number in range(len(items))]

    def work(self, units: Iterable, function: Callable, claim: Callable | None = None, bar=None) -> list:
        """Each unit's result in order on rank 0, an empty list on the others.

        A unit is done by the rank that claims it; where no claim is given, by each rank in its turn. The function
        calls `beat` now and then. bar: shows on rank 0 what all ranks have reported (has `update`).
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
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            line = told(error)
        return self._lead_out(results, line) if self.rank == 0 else self._follow_out(results, line)

    def beat(self, samples: int) -> None:
        """Reports samples done, and hears whether the work goes on. To be called often: it is cheap."""
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
        """To be called before exiting with an error: a launcher kills all ranks as soon as one has left.

        Ends ranks that hang, for which the launcher would wait.
        """
        if self._silent:
            self.comm.Abort(1)
        elif self.size > 1:
            self.comm.Barrier()

    def _flush(self):
        if self._bar is not None:
            self._bar.update(self._reported)
        self._reported = 0

    def _listen(self):
        """Takes in what the other ranks have sent, on rank 0."""
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
            self._tell(line)

    def _tell(self, line):
        for rank in range(1, self.size):
            self.comm.send(line, rank, OUTCOME)

    def _lead_out(self, results, line) -> list:
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
                    self._silent = set(range(self.size)) - set(self._ended)
                    break
            time.sleep(0.01)
        if self._line:
            raise UserError(self._line, on_all_ranks=True)
        self._tell(None)
        return [result for _, result in sorted(chain(*self._ended.values()), key=lambda pair: pair[0])]

    def _follow_out(self, results, line) -> list:
        self.comm.send(("samples", self._reported), 0, REPORT)
        self.comm.send(("end", (results, line)), 0, REPORT)
        while not self.comm.iprobe(source=0, tag=OUTCOME):
            time.sleep(0.01)  # a blocking receive would spin and take a core from those at work
        if outcome := self.comm.recv(source=0, tag=OUTCOME):
            raise UserError(outcome, on_all_ranks=True)
        return []


def claims(folder: Path) -> Callable[[str], bool]:
    """A claim by the first to make a file of the unit's name: balances ranks of any speed, on any shared disk."""
    def claim(unit) -> bool:
        try:
            os.close(os.open(folder / str(unit), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    return claim


@contextmanager
def progress(team, samples):
    """A bar on rank 0 with rate and time left; one that is shown after a while, and seldom where no one watches."""
    if team.rank or not samples:
        yield None
        return
    from tqdm import tqdm

    interval = 0.5 if sys.stderr.isatty() else 10
    with tqdm(total=samples, unit=" images", delay=2, mininterval=interval, leave=False) as bar:
        yield bar


def told(error: Exception) -> str:
    """What to tell the user about an error of any kind."""
    known = isinstance(error, UserError | OSError | ValueError) or "No space left" in str(error)
    return one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"


def _attempt(action) -> tuple:
    try:
        return action(), None
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        return None, told(error)


def _settle(outcomes) -> list:
    """The results; raises the first error among them, which is the same on every rank."""
    for _, line in outcomes:
        if line:
            raise UserError(line, on_all_ranks=True)
    return [result for result, _ in outcomes]
