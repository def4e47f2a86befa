"""What this process does or waits for, as another thread sees it when the main thread moves no more."""
import contextlib
import time
from collections.abc import Callable, Iterator

OTHERS = "waiting for the other workers"
DATA = "waiting for data"
OBSERVERS = "writing logs and reports"


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
        """Context manager for something that may take long. After it, what was done before goes on.

        inside: returns a number that changes with progress which no Python code sees, and a more exact name, or None.
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
        """Returns what the main thread does, and for how many seconds it has not moved. One thread calls it regularly.
        """
        name, inside, moves = self._name, self._inside, self._moves
        count, exact = inside() if inside else (0, None)
        if (moves, count) != self._seen:
            self._seen = moves, count
            self._since = time.monotonic()
        return exact or name, time.monotonic() - self._since

    def forget(self) -> None:
        """Counts the seconds from now on: the process was suspended."""
        self._seen = None


activity = Activity()
