"""The stages of a start, such as loading TensorFlow, with their seconds, on standard error.

On a terminal, each stage is a line that appears when the stage begins. Elsewhere, `end` prints one line for all stages,
and a stage that takes long is announced while it runs.
"""
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from common.activity import activity

SHORTEST = 0.1  # seconds; shorter stages are not shown
ANNOUNCED_AFTER = 30.0  # seconds; without a terminal, a stage that takes longer shows what the process waits for


class StartUp:
    """The start of this process. One stage runs at a time.

    is_open: whether stages are shown: after `begin` and before `end`, on rank 0. is_silent: whether this is another
    rank.
    """

    def __init__(self):
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}  # of each stage
        self.is_open = False
        self.is_silent = False

    def begin(self, rank: int) -> None:
        """Shows the stages from now on if this is rank 0. Other ranks are silent."""
        self.is_open = rank == 0
        self.is_silent = rank != 0

    @contextlib.contextmanager
    def stage(self, name: str, inside: Callable[[], tuple[int, str | None]] | None = None) -> Iterator[None]:
        """Shows a stage and its seconds. Repeated stages, as after a loss of workers, are shown once.

        inside: see common.activity.
        """
        if not self.is_open or name in self._seconds:
            with activity.during(name, inside):
                yield
            return
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
            with activity.during(name, inside):
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


startup = StartUp()
