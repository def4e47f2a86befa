"""Splits work among the processes that mpirun started. An error on one rank ends all ranks with the same one line.

Between two samples, a rank looks for messages of the others. No rank waits for another while there is work, and all
ranks learn of an error within a sample's time.
"""
import atexit
import os
import time
from collections.abc import Callable, Iterable
from itertools import chain

from common import open_mpi
from common.activity import startup
from common.errors import UserError, complain, full_disk, one_line
from common.screen import Counter

LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")  # every MPI launcher sets one of these
EVERY = 0.2  # seconds between two exchanges of messages
PATIENCE = 20  # seconds in which all ranks have to stop after an error


class Team:
    """The ranks of a run.

    A process without a launcher, or with `single_process`, is rank 0 of 1 and does not load MPI.
    """

    def __init__(self, single_process: bool = False):
        self._comm = None
        if not single_process and any(name in os.environ for name in LAUNCHED):
            with open_mpi.configured():
                from mpi4py import MPI  # starts MPI

            atexit.register(MPI.Finalize)  # mpi4py's own comes after all of atexit, and so after the folder is gone
            self._comm = MPI.COMM_WORLD
        self.rank, self.size = (self._comm.rank, self._comm.size) if self._comm else (0, 1)
        self._counter = None
        self._reported = 0  # finished samples that the others do not know of
        self._next = 0.0  # time of the next exchange of messages
        self._error = None  # on any rank
        self._deadline = float("inf")  # time to end ranks that do not stop

    def log(self, line: str) -> None:
        """Prints a line on standard error, on rank 0 only."""
        if self.rank == 0:
            complain(line)

    def abort(self, line: str) -> None:
        """Ends every rank because of an error that may be on this rank only."""
        complain(line)
        if self._comm:
            self._comm.Abort(1)

    def barrier(self) -> None:
        """Barrier before exit with an error, because a launcher kills all ranks when one exits."""
        if self._comm:
            self._comm.Barrier()

    def on_rank_0(self, action: Callable):
        """Runs the action on rank 0 and returns its result on every rank. Raises its error on every rank."""
        outcome = _attempt(action) if self.rank == 0 else None
        result, error = self._comm.bcast(outcome) if self._comm else outcome
        if error:
            raise UserError(error, on_all_ranks=True)
        return result

    def map(self, items: Iterable, function: Callable) -> list:
        """Applies the function to every item, each on one rank. Returns all results, in order, on every rank."""
        results = self.work(items, function)
        return self.on_rank_0(lambda: results)

    def work(self, units: Iterable, function: Callable, samples: int = 0, claim: Callable | None = None,
             name: str = "") -> list:
        """Returns each unit's result in order on rank 0, and an empty list on the other ranks.

        The rank that claims a unit works on it. Without `claim`, the ranks take turns. samples: the number of times
        that the function calls `beat(1)` for all units; rank 0 shows them with their rate and the time left. name:
        what is done, in that line.
        """
        is_hidden = bool(self.rank or not samples or startup.is_silent)
        with Counter(name, samples, "images", is_hidden=is_hidden) as self._counter:
            results, error = _attempt(lambda: [(number, function(unit)) for number, unit in enumerate(units)
                                               if (claim(unit) if claim else number % self.size == self.rank)])
            errors = self._meet(error)
        if any(errors):
            raise UserError(next(filter(None, errors)), on_all_ranks=True)
        gathered = dict(chain(*self._comm.gather(results) or ()) if self._comm else results)
        return [gathered[number] for number in sorted(gathered)]

    def beat(self, samples: int) -> None:
        """Reports finished samples. Raises another rank's error. It is cheap and should be called often."""
        self._reported += samples
        if time.monotonic() >= self._next:
            self._exchange()
            if self._error:
                raise UserError(self._error)

    def _exchange(self):
        """Sends finished samples to rank 0's counter, and receives what the other ranks have sent."""
        self._counter.add(self._reported)
        if self.rank and self._reported:
            self._comm.send(self._reported, 0)
        self._reported = 0
        self._next = time.monotonic() + EVERY
        while self._comm and self._comm.iprobe():
            match self._comm.recv():
                case str(error):
                    self._fail(error)
                case samples:
                    self._counter.add(samples)

    def _fail(self, error):
        self._error = error
        self._deadline = time.monotonic() + PATIENCE + self.rank  # rank 0 speaks unless it hangs

    def _meet(self, error) -> list:
        """Waits until all ranks have stopped, and returns their errors. After an error, ends ranks that do not stop."""
        self._exchange()
        if not self._comm:
            return [error]
        if error and not self._error:
            self._fail(error)
            self._sent = [self._comm.isend(error, rank) for rank in range(self.size) if rank != self.rank]
        arrival = self._comm.Ibarrier()
        while not arrival.Test():
            time.sleep(0.01)  # a blocking receive would spin and take a core from the working ranks
            self._exchange()
            if time.monotonic() > self._deadline:
                self._counter.close()
                self.abort(self._error)
        return self._comm.allgather(error)


def error_message(error: Exception) -> str:
    """Returns what to tell the user about an error of any type."""
    known = isinstance(error, UserError | OSError | ValueError) or full_disk(error)
    return one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"


def _attempt(action) -> tuple:
    """Returns (result, None) or (None, error message)."""
    try:
        return action(), None
    except Exception as error:  # of any type: the other ranks must not wait for this one
        return None, error_message(error)
