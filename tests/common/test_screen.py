"""Progress of counted work: its rate once there is one, as plain lines and as a bar."""
import sys

import pytest

from common import screen
from common.screen import Counter
from tests.reporting.test_progress import Terminal

WORK = """
import sys, time
from common import screen
from common.screen import Counter
now = [100.0]
screen.time.perf_counter = lambda: now[0]
with Counter("writing", 1000, "images") as counter:
    for second in range(1, 9):
        counter.add(50)
        now[0] += 1
"""


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(screen.time, "perf_counter", lambda: now[0])
    return now


def test_the_clock_starts_with_the_first_count(clock, capsys):
    """40 s of loading are no part of the rate: 20 images in each second after the first 10 images."""
    with Counter("writing", 1000, "images") as counter:
        clock[0] += 40
        counter.add(10)
        for _ in range(25):
            clock[0] += 1
            counter.add(20)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["writing: 50 of 1,000 images, 20 images/s, 0:48 left",
                     "writing: 250 of 1,000 images, 20 images/s, 0:38 left",
                     "writing: 450 of 1,000 images, 20 images/s, 0:28 left"]


def test_bytes_are_shown_in_megabytes_and_short_or_hidden_work_is_not(clock, capsys):
    for seconds, is_hidden in ((1.9, False), (60, True), (2, False)):
        with Counter("staging", 300_000_000, "MB", scale=1e6, is_hidden=is_hidden) as counter:
            counter.add(100_000_000)
            clock[0] += seconds
            counter.add(100_000_000)
    assert capsys.readouterr().err == "staging: 200 of 300 MB, 50 MB/s, 0:02 left\n"


def test_a_bar_on_a_terminal_that_leaves_nothing():
    terminal = Terminal(sys.executable, "-c", WORK)
    terminal.finish()
    shown = [line for lines in terminal.screens for line in lines if "images" in line]
    assert shown[0].startswith("writing ") and shown[0].endswith("  15%  150 of 1,000 images  50 images/s  0:17 left")
    assert "40%" in shown[-1] and terminal.left_clean() and not terminal.lines
