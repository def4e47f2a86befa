"""Progress on standard error: bars that are redrawn on a terminal, and plain lines elsewhere."""
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator

from common.activity import on_terminal

REDRAWN_EVERY = 0.5  # seconds
PRINTED_EVERY = 10.0  # seconds, without a terminal
SHORTEST = 2.0  # seconds of work, before which nothing is shown
SMALLEST_BAR = 4  # columns
LARGEST_BAR = 30
SMALLEST_SCREEN = 60


class Screen:
    """Lines with a bar at the bottom of a terminal, one for each name. Other lines scroll above them.

    They are redrawn when `draw` is called, not by a thread, and the cursor stays visible, so a process that is killed
    leaves nothing to restore.
    """

    def __init__(self, *names: str):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
        self._console.show_cursor = lambda show=True: False
        self._bar = BarColumn(complete_style="cyan", finished_style="cyan")
        self._progress = Progress(
            TextColumn("{task.description}", markup=False), self._bar, TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[figures]}", markup=False), console=self._console, auto_refresh=False,
            transient=True, redirect_stdout=False)
        self._lines = [self._progress.add_task(name, total=1.0, figures="") for name in names]
        self._widest = max(map(len, names))

    def draw(self, *lines: tuple[float, list[str]]) -> None:
        """Draws each line: the part that is done, and its figures. Those that do not fit are left out from the end."""
        with interrupted_later():
            self._draw(lines)

    def _draw(self, lines):
        columns = self._console.width
        self._bar.bar_width = max(SMALLEST_BAR, min(LARGEST_BAR, SMALLEST_BAR + (columns - SMALLEST_SCREEN) // 3))
        room = columns - self._widest - len("  100%   ") - self._bar.bar_width
        for task, (done, figures) in zip(self._lines, lines, strict=True):
            self._progress.update(task, completed=done, figures=f" {fitting(figures, room)}")
        if self._progress.live.is_started:
            self._progress.refresh()
        else:
            self._progress.start()

    def close(self) -> None:
        with interrupted_later():
            self._progress.stop()


class Counter:
    """Context manager that shows how much of some work is done, its rate and the time left.

    The clock of the rate starts with the first call of `add`, after the program has loaded what it needs.

    done: the sum of all counts so far.
    total: what `done` will be at the end.
    unit: name of what is counted.
    scale: counts in one unit, such as 1e6 for bytes that are shown in MB.
    """

    def __init__(self, name: str, total: int, unit: str, scale: float = 1, is_hidden: bool = False):
        self._name, self._total, self._unit, self._scale = name, total, unit, scale
        self._is_hidden = is_hidden
        self.done = self._before = 0  # now, and when the clock started
        self._began = self._shown = None
        self._screen = None

    def __enter__(self) -> "Counter":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        if self._screen:
            self._screen.close()
            self._screen = None

    def add(self, count: int) -> None:
        self.done += count
        now = time.perf_counter()
        if self._is_hidden or not count:
            return
        if self._began is None:
            self._began, self._before, self._shown = now, self.done, now + SHORTEST - PRINTED_EVERY
        terminal = on_terminal()
        if now - self._began >= SHORTEST and now - self._shown >= (REDRAWN_EVERY if terminal else PRINTED_EVERY):
            self._shown = now
            self._show(terminal, (self.done - self._before) / (now - self._began))

    def _show(self, terminal, rate):
        figures = [f"{self.done / self._scale:,.0f} of {self._total / self._scale:,.0f} {self._unit}",
                   f"{rate / self._scale:,.0f} {self._unit}/s", f"{clock_time((self._total - self.done) / rate)} left"]
        if terminal:
            self._screen = self._screen or Screen(self._name)
            self._screen.draw((self.done / self._total, figures))
        else:
            print(f"{self._name}: {', '.join(figures)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def interrupted_later() -> Iterator[None]:
    """Holds Ctrl-C back until the end of the block. In the middle of a redraw, it would leave rich's console locked."""
    received = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        before(*received[0])


def fitting(figures: list[str], columns: int) -> str:
    """Returns the first figures, as many as fit. Empty ones are left out."""
    shown = ""
    for figure in filter(None, figures):
        longer = f"{shown}  {figure}" if shown else figure
        if len(longer) > columns:
            break
        shown = longer
    return shown


def clock_time(seconds: float) -> str:
    """Returns seconds as 0:45 or 12:05:30."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
