"""What this process does or waits for, by name.

`activity.during` names what may take long. Another thread, the heartbeat, reads the name when the main thread no longer
moves. `startup.stage` also measures its seconds, from `begin` to `end`, which prints one line for all stages. A stage
that takes long is announced while it runs.
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
ANNOUNCED_AFTER = {True: 1.0, False: 30.0}  # seconds of a stage, on a terminal and elsewhere


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
        """Measures a stage. Repeated stages, as after a loss of workers, are measured once.

        inside: see Activity.during.
        """
        is_new = self.is_open and name not in self._seconds
        with activity.during(name, inside), self._timed(name) if is_new else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _timed(self, name) -> Iterator[None]:
        began = time.perf_counter()
        self._seconds[name] = 0.0
        after = ANNOUNCED_AFTER[on_terminal()]
        announcement = threading.Timer(after, print, [f"start-up: {name} ..."], {"file": sys.stderr, "flush": True})
        announcement.daemon = True
        announcement.start()
        try:
            yield
        finally:
            announcement.cancel()
            self._seconds[name] = time.perf_counter() - began

    def end(self) -> None:
        """Ends the start, and prints the line for all stages."""
        if not self.is_open:
            return
        self.is_open = False
        listed = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items() if seconds >= SHORTEST)
        if listed:
            print(f"start-up: {time.perf_counter() - self._began:.1f} s ({listed})", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb").lower() not in ("", "dumb", "unknown")


activity = Activity()
startup = StartUp()
