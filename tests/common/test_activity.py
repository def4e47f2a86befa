"""The stages of a start: one line for all of them without a terminal, none on other ranks, none after an error."""
import re

import pytest

from common import activity as startups
from common.activity import StartUp


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(startups.time, "perf_counter", lambda: now[0])
    return now


def started(clock, rank=0) -> StartUp:
    startup = StartUp()
    startup.begin(rank)
    for name, seconds in (("loading", 2.5), ("asking", 0.05), ("connecting 4 workers", 1.25), ("loading", 7.0)):
        with startup.stage(name):
            clock[0] += seconds
    return startup


def test_without_a_terminal_one_line_lists_the_stages_at_the_end(clock, capsys):
    startup = started(clock)
    assert capsys.readouterr().err == ""
    startup.end()
    startup.end()
    assert capsys.readouterr().err == "start-up: 10.8 s (loading 2.5 s, connecting 4 workers 1.2 s)\n"
    with startup.stage("later"):
        clock[0] += 9
    assert capsys.readouterr().err == ""


def test_other_ranks_are_silent(clock, capsys):
    started(clock, rank=1).end()
    assert capsys.readouterr().err == ""


def test_a_program_that_does_not_begin_it_is_silent(clock, capsys):
    startup = StartUp()
    with startup.stage("loading"):
        clock[0] += 9
    startup.end()
    assert capsys.readouterr().err == "" and not startup.is_silent


def test_a_stage_that_takes_long_is_announced_while_it_runs(monkeypatch, capsys):
    import time

    monkeypatch.setattr(startups, "ANNOUNCED_AFTER", 0.1)
    startup, shown = StartUp(), ""
    startup.begin(0)
    with startup.stage("connecting 4 workers"):
        while not shown:
            time.sleep(0.02)
            shown = capsys.readouterr().err
    assert shown == "start-up: connecting 4 workers ...\n"


def test_on_a_terminal_a_stage_shows_before_its_seconds_and_an_error_clears_it(clock, capsys, monkeypatch):
    monkeypatch.setattr(startups, "on_terminal", lambda: True)
    startup = started(clock)
    with pytest.raises(ValueError), startup.stage("failing"):
        raise ValueError
    text = capsys.readouterr().err
    assert re.findall(r"(\w[\w ]*) \.\.\. (?=\r)", text) == ["loading", "asking", "connecting 4 workers", "failing"]
    assert re.findall(r"\r([\w ]* \.\.\. [\d.]+ s)\n", text) == ["loading ... 2.5 s", "connecting 4 workers ... 1.2 s"]
    assert text.endswith("\r") and text.splitlines()[-1].strip() == ""
    startup.end()
    assert capsys.readouterr().err == ""
