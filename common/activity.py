"""What this process does or waits for, by name.

`activity.during` names what may take long. Another thread, the heartbeat, reads the name when the main thread no longer
moves. `startup.stage` also shows it and its seconds on standard error, from `begin` to `end`. On a terminal, each stage
is a line that appears when the stage begins. Elsewhere, `end` prints one line for all stages, and a stage that takes
long is announced while it runs.
"""
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

COMPUTING = "computing"
DATA = "waiting for data"
OTHERS = "waiting for the other workers"
OBSERVERS = "writing logs and reports"
PARTS = {"compute": COMPUTING, "data": DATA, "exchange": "exchanging gradients"}  # of a step's time, as logs name them
WAITS = "data", "exchange"  # the parts in which a worker waits instead of computing
SHORTEST = 0.1  # seconds; shorter stages are not shown
ANNOUNCED_AFTER = 30.0  # seconds; without a terminal, a stage that takes longer shows what the process waits for


class Activity:
    """What the main thread does. step: the update that it has reached."""

    def __init__(self):
        self.step = 0
        self._name = "starting"
        self._inside = None
        self._moves = 0
        self._seen = None  # (moves, count) at the last look
        self._since = time.monotonic()  # when that changed

    @contextlib.contextmanager
    def during(self, name: str, inside: Callable[[], tuple[int, str | None]] | None = None) -> Iterator[None]:
        """Context manager that names what the main thread does, until its end. The activity before it then continues.

        inside: shows progress within one call of a library: a function that returns a number that changes as long as
            the call progresses, and a more exact name of the activity or None.
        """
        before = self._name, self._inside
        self._enter(name, inside)
        try:
            yield
        finally:
            self._enter(*before)

    def _enter(self, name, inside):
        self._name = name
        self._inside = inside
        self._moves += 1

    def look(self) -> tuple[str, float]:
        """Returns what the main thread does, and for how many seconds there was no progress.

        A single thread calls it regularly: progress is a change since its last call.
        """
        name, inside, moves = self._name, self._inside, self._moves
        count, exact = inside() if inside else (0, None)
        if (moves, count) != self._seen:
            self._seen = moves, count
            self._since = time.monotonic()
        return exact or name, time.monotonic() - self._since

    def forget(self) -> None:
        """Starts the count of seconds without progress again, because the process was suspended."""
        self._seen = None


class StartUp:
    """The start of this process, in stages. One stage runs at a time."""

    def __init__(self):
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}  # of each stage
        self.is_open = False  # whether stages are shown: on rank 0, between `begin` and `end`
        self.is_silent = False  # whether this is another rank than 0

    def begin(self, rank: int) -> None:
        """Shows the stages from now on if this is rank 0. Other ranks are silent."""
        self.is_open = rank == 0
        self.is_silent = rank != 0

    @contextlib.contextmanager
    def shown(self, rank: int) -> Iterator[None]:
        """Context manager in which the stages are shown if this is rank 0. No line sums them up, unlike at `end`."""
        self.begin(rank)
        try:
            yield
        finally:
            self.is_open = False

    @contextlib.contextmanager
    def stage(self, name: str, inside: Callable[[], tuple[int, str | None]] | None = None) -> Iterator[None]:
        """Shows a stage and its seconds. Repeated stages, as after a loss of workers, are shown once.

        inside: see Activity.during.
        """
        is_shown = self.is_open and name not in self._seconds
        with activity.during(name, inside), self._shown(name) if is_shown else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _shown(self, name) -> Iterator[None]:
        began = time.perf_counter()
        self._seconds[name] = 0.0
        terminal = on_terminal()
        announcement = threading.Timer(ANNOUNCED_AFTER, print, [f"start-up: {name} ..."], {"file": sys.stderr})
        announcement.daemon = True
        if terminal:
            print(f"{name} ... ", end="", file=sys.stderr, flush=True)
        else:
            announcement.start()
        is_done = False
        try:
            yield
            is_done = True
        finally:
            announcement.cancel()
            self._seconds[name] = seconds = time.perf_counter() - began
            if terminal:
                self._clear(name)
                if is_done and seconds >= SHORTEST:
                    print(f"{name} ... {seconds:.1f} s", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clears the line of a stage that a signal ends."""
        if self.is_open and self._seconds and on_terminal():
            self._clear([*self._seconds][-1])

    def _clear(self, name):
        print(f"\r{' ' * len(f'{name} ... ')}\r", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Ends the start. Prints the line for all stages if there is no terminal."""
        if not self.is_open:
            return
        self.is_open = False
        listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items() if seconds >= SHORTEST)
        if listed and not on_terminal():
            print(f"start-up: {time.perf_counter() - self._began:.1f} s ({listed})", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb").lower() not in ("", "dumb", "unknown")


activity = Activity()
startup = StartUp()
