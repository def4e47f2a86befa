"""The stages of a start: one line for all of them, none on other ranks, none after an error."""
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


def test_one_line_lists_the_stages_at_the_end(clock, capsys):
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


@pytest.mark.parametrize("terminal", [True, False])
def test_a_stage_that_takes_long_is_announced_while_it_runs(terminal, monkeypatch, capsys):
    import time

    monkeypatch.setattr(startups, "on_terminal", lambda: terminal)
    monkeypatch.setattr(startups, "ANNOUNCED_AFTER", {terminal: 0.1, not terminal: 99})
    startup, shown = StartUp(), ""
    startup.begin(0)
    with startup.stage("connecting 4 workers"):
        while not shown:
            time.sleep(0.02)
            shown = capsys.readouterr().err
    assert shown == "start-up: connecting 4 workers ...\n"
    with pytest.raises(ValueError), startup.stage("failing"):
        raise ValueError
    assert capsys.readouterr().err == ""
