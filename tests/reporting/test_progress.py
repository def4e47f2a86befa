"""The display of a run, on terminals of several widths, as a terminal emulator sees it, and in a log."""
import codecs
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pyte
import pytest
from conftest import DIGITS, ROOT, TINY, environment, launcher, printed_json, run

from reporting import progress
from reporting.progress import Pace, clock_time, fitting

HIDES_CURSOR = b"\x1b[?25l"


class Terminal:
    """A program on a terminal. screens: what it shows, after each change."""

    def __init__(self, *command, columns=100, **variables):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        hidden = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
        given = {name: value for name, value in environment().items() if name not in hidden}
        self.process = subprocess.Popen(
            [*map(str, command)], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, cwd=ROOT, start_new_session=True,
            env=given | {"TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"} | variables)
        os.close(theirs)
        self._ours, self._text = ours, codecs.getincrementaldecoder("utf-8")()
        self.screen, self.raw, self.screens = pyte.Screen(columns, 40), b"", []
        self._stream = pyte.Stream(self.screen)

    def read(self) -> bool:
        """Waits for output; returns False at its end."""
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the program has closed the terminal
            data = b""
        self.raw += data
        for part in self._text.decode(data).splitlines(keepends=True):  # one read may bring several changes
            self._stream.feed(part)
            self.screens.append(self.lines)
        return bool(data)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def finish(self) -> int:
        while self.read():
            pass
        os.close(self._ours)
        self.stdout = self.process.communicate(timeout=300)[0].decode()
        return self.process.returncode

    def shown(self) -> list[tuple[str, str]]:
        """The two lines of the display, each time that both were there."""
        found = [(lines[-2], lines[-1]) for lines in self.screens
                 if len(lines) > 1 and lines[-2].startswith("run   ") and lines[-1].startswith("epoch ")]
        return list(dict.fromkeys(found))

    def left_clean(self) -> bool:
        """Whether the display is gone, and the cursor is visible and at the start of a line."""
        shown = any(line.startswith(("run   ", "epoch ━")) for line in self.lines)
        return not shown and self.screen.cursor.x == 0 and not self.screen.cursor.hidden and (
            HIDES_CURSOR not in self.raw)


PROGRAM = """
import contextlib, sys, time
from types import SimpleNamespace as Any
from common.errors import complain
from reporting import progress
from training.observer import Evaluation, Update
SIZE = 1000

def update(number, batch=100, loss=0.5):
    waits = {"data": 0.02} if number % 20 == 1 else {}
    return Update(number, number * batch / SIZE, batch, 29.5, 0.9, loss, 0.875, waits)

def evaluated(epoch, top1, **more):
    row = {"epoch": epoch, "learning_rate": 2.0, "train_loss": 1.5, "train_top1": 0.25, "val_loss": 1.25,
           "val_top1": top1, "images_per_second": 1234.5, "batch_size": 100, **more}
    return Evaluation(row, {}, {"compute": 0.8, "data": 0.15, "exchange": 0.05}, None)

def display(samples=0, best=None, redrawn_every=0.0):
    progress.REDRAWN_EVERY = redrawn_every
    made = progress.ProgressDisplay()
    made.start(Any(progress=Any(samples=samples, best=best), dataset=Any(train=Any(samples=SIZE)),
                   plan={"epochs": 12, "phases": [{"steps": 120, "global_batch_size": 100}]}))
    return made
"""


def drawn(program: str, **options) -> Terminal:
    """The terminal of a finished program that shows a display."""
    terminal = Terminal(sys.executable, "-c", PROGRAM + program, **options)
    terminal.finish()
    return terminal


STEPS = """
shown = display()
for number in range(17):
    time.sleep(0.001)
    shown.step(update(number))
    if number == 9:
        shown.evaluation(evaluated(1, 0.7525))
"""


@pytest.mark.parametrize(("columns", "above", "below"), [
    (100, ("epoch 2/12", "left", "best top-1 75.25%", "lr 29.5"),
     ("images/s", "loss 0.5000", "top-1 87.5%", "data 2%", "batch 100")),
    (80, ("epoch 2/12", "left", "best top-1 75.25%", "lr 29.5"),
     ("images/s", "loss 0.5000", "top-1 87.5%", "data 2%")),
    (60, ("epoch 2/12", "left", "best top-1 75.25%"), ("images/s", "loss 0.5000", "top-1 87.5%")),
    (40, ("epoch 2/12",), ("images/s",))])
def test_two_lines_fit_the_terminal(columns, above, below):
    terminal = drawn(STEPS, columns=columns)
    run_line, epoch_line = terminal.shown()[-1]
    assert "  14%  " in run_line and "  70%  " in epoch_line  # 17 of 120 steps, 7 of 10
    assert max(map(len, (run_line, epoch_line))) <= columns
    assert [word for word in above if word not in run_line] == [word for word in below if word not in epoch_line] == []


def test_other_lines_scroll_above_intact_and_nothing_is_left():
    long = "/a/long/path" * 20
    terminal = drawn(STEPS + f"complain('a warning about {long}')\nshown.step(update(17))\nshown.close()\n", columns=80)
    assert f"bigbatch: a warning about {long}".encode() in terminal.raw  # without a line break of ours
    assert terminal.left_clean() and terminal.lines[0] == "                  loss   top-1       loss   top-1"
    assert terminal.lines[1].startswith("epoch 1/12  train 1.5000 25.00%  val 1.2500 75.25%")
    assert "".join(terminal.lines).count("bigbatch: ") == 1
    assert len(terminal.shown()) >= 2


@pytest.mark.parametrize("end", ["raise ValueError('broken')", "sys.exit('ended')", "raise KeyboardInterrupt"])
def test_an_exception_leaves_the_terminal_as_it_was(end):
    terminal = drawn(f"with contextlib.ExitStack() as held:\n    shown = display()\n    held.callback(shown.close)\n"
                     f"    shown.step(update(0))\n    {end}\n")
    assert b"epoch 1/12" in terminal.raw and terminal.left_clean() and terminal.process.returncode


def test_no_color_is_respected_and_a_terminal_that_cannot_redraw_gets_lines():
    colour = re.compile(rb"\x1b\[[0-9;]*3[0-9][0-9;]*m")
    assert colour.search(drawn(STEPS).raw)
    plain = drawn(STEPS, NO_COLOR="1")
    assert not colour.search(plain.raw) and plain.shown()
    dumb = drawn(STEPS, TERM="dumb")
    assert b"\x1b" not in dumb.raw and [line.startswith("epoch ") for line in dumb.lines] == [True]


def test_it_is_redrawn_calmly():
    """One redraw at once, and one for each half second of the steps."""
    terminal = drawn("shown, began, number = display(redrawn_every=0.5), time.monotonic(), 0\n"
                     "while number <= 50 or time.monotonic() < began + 1.2:\n"
                     "    shown.step(update(number % 100))\n    number += 1\n"
                     "print(time.monotonic() - began)\n")
    assert 2 <= terminal.raw.count(b"run   ") <= 3 + float(terminal.stdout) / 0.5  # one more is shown at the end


def test_resumed_and_rolled_back_it_starts_where_training_is():
    terminal = drawn("shown = display(6000, {'top1': 0.625})\nshown.step(update(60))\ntime.sleep(0.5)\n"
                     "shown.rewind(Any(samples=3000, best={'top1': 0.5}))\nshown.step(update(30))\n")
    (resumed, _), *_, (back, _) = terminal.shown()
    assert "  51%  epoch 7/12  best top-1 62.50%" in resumed  # the speed is not known yet
    assert "  26%  epoch 4/12  best top-1 50.00%" in back


def test_the_line_of_an_evaluation_greps_well():
    """It has 80 columns at most, and the time left is last."""
    program = ("shown = display()\nfor number in range(9):\n    shown.step(update(number))\n"
               "shown.evaluation(evaluated(1, 0.75))\nshown.evaluation(evaluated(2, 0.75, ema_val_top1=0.875))\n")
    begin = r"epoch \d/12  train 1\.5000 25\.00%  val 1\.2500 75\.00%  "
    plain, averaged = run("python", 1, "-c", PROGRAM + program).stderr.splitlines()
    assert re.fullmatch(begin + r"1,23\d images/s  left \d+:\d\d", plain)
    assert re.fullmatch(begin + r"ema 87\.50%  left \d+:\d\d", averaged)


def test_a_late_first_evaluation_is_announced():
    """Without a terminal: the speed and the time left, once."""
    program = ("import reporting.progress as progress\nprogress.SPEED_AFTER = 0.2\nshown = display()\n"
               "for number in range(12):\n    shown.step(update(number))\n    time.sleep(0.05)\n")
    [line] = run("python", 1, "-c", PROGRAM + program).stderr.splitlines()
    assert re.fullmatch(r"[\d,]+\.\d images/s; \d+:\d\d left", line)


def test_time_left_counts_steps_and_evaluations(monkeypatch):
    now, pace = [0.0], Pace()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    assert pace.seconds(100) is None
    for _ in range(11):
        pace.step(50)
        now[0] += 2.0  # 25 images/s
    now[0] += 3.0  # the evaluation's 5 s begin at the end of the last step
    assert pace.images_per_second == pytest.approx(25) and pace.seconds(100) == pytest.approx(4)
    pace.pause()
    assert pace.seconds(550) == pytest.approx(550 / 25 + 5)
    now[0] += 2.5  # opening the input took half a second
    pace.step(50)
    assert pace.images_per_second == pytest.approx(25) and pace.seconds(600) == pytest.approx(600 / 25 + 5.5)


def test_small_helpers():
    assert [clock_time(seconds) for seconds in (0, 59.6, 3599, 360_000)] == ["0:00", "1:00", "59:59", "100:00:00"]
    assert fitting(["abc", "", "de", "f"], 7) == "abc  de" and fitting(["abc"], 2) == ""


def test_training_on_a_terminal_shows_its_stages_then_its_progress(tmp_path):
    terminal = Terminal(*launcher("python", 1), "train.py", *TINY, "--epochs=4", f"--output_dir={tmp_path}")
    assert terminal.finish() == 0 and terminal.left_clean()
    lines = terminal.lines
    [start] = re.findall(r"start-up:\d.*?\)", re.sub(r"\s", "", "".join(lines)))  # it is longer than the screen is wide
    assert re.search(r"buildingthemodel\d+\.\ds,.*thefirststep\d+\.\ds\)", start)
    assert [line.split()[1] for line in lines if line.startswith("epoch ")] == [f"{epoch}/4" for epoch in range(1, 5)]
    assert terminal.shown() and all("epoch " in above and "loss " in below for above, below in terminal.shown())
    [heads] = [number for number, line in enumerate(lines) if re.fullmatch(" +loss +top-1 +loss +top-1", line)]
    assert lines[heads + 1].startswith("epoch 1/4  train ")
    assert len(re.findall("\x1b\\[1mtop-1 [0-9.]+%\x1b\\[0m \\(the first", terminal.raw.decode())) == 1  # bold
    assert json.loads(terminal.stdout)["epochs"] == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_the_terminal_as_it_was(number, tmp_path):
    terminal = Terminal(*launcher("python", 1), "train.py", *TINY, "--epochs=300", f"--output_dir={tmp_path}")
    deadline = time.monotonic() + 300
    while not terminal.shown() and time.monotonic() < deadline:
        assert terminal.read(), terminal.lines
    terminal.process.send_signal(number)
    assert terminal.finish() == 75 and terminal.left_clean(), terminal.lines
    assert f"--output_dir={tmp_path}" in "".join(terminal.lines) and list((tmp_path / "checkpoints").iterdir())


@pytest.mark.trainings
@pytest.mark.parametrize("kind", ["mpirun", "horovodrun"])
def test_other_ranks_are_silent(kind, tmp_path, monkeypatch):
    """At a first start, which makes the data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = run(kind, 2, ROOT / "train.py", *TINY, "--epochs=1", f"--output_dir={tmp_path}/run")
    assert done.returncode == 0 and printed_json(done)["world_size"] == 2
    ours = [line for line in done.stderr.splitlines() if not line.startswith("[1]")]
    assert ours == done.stderr.splitlines()
    plain = [line for line in (line.removeprefix("[0]<stderr>:") for line in ours)
             if not line.startswith("writing: ")]  # where making the data takes seconds
    starts = ("recipe: ", "forecast: ", "run: ", "start-up: ", "epoch 1/1  ", "validation: ", "weakest classes: ",
              "report: ")
    assert [next((start for start in starts if line.startswith(start)), line) for line in plain] == [*starts]
    stages = (r"\((loading TensorFlow \d+\.\d s, )?making digits \d+\.\d s, (.*, )?"
              r"the first step \d+\.\d s\)$")
    assert re.search(stages, plain[3]), plain[3]


def test_the_display_is_not_imported_without_a_terminal(tmp_path):
    program = ("import sys, train; code = train.main(['train.py', *sys.argv[1:]]); "
               "print('rich' in sys.modules, file=sys.stderr); sys.exit(code)")
    done = run("python", 1, "-c", program, DIGITS, *TINY, "--epochs=0.1", f"--output_dir={tmp_path}")
    assert done.stderr.splitlines()[-1] == "False", done.stderr
