"""Ctrl-C while a command imports its modules, of which one waits here: one line and 130, as later."""
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, environment

from common import command, end_at_once

WAITS = "import os, time\nopen(os.environ['REACHED'], 'w').close()\ntime.sleep(60)\n"
ROOMS = ("data", "experiments", "launch", "reporting")  # distributed.gloo imports Horovod before anything of ours
PROGRAMS = sorted(f"{room}.{path.stem}" for room in ROOMS for path in (ROOT / room).glob("*.py")
                  if re.search(r"with \(?command\.shell\(", path.read_text()))


@pytest.mark.parametrize("program", ["train.py", *PROGRAMS])
def test_it_ends_the_command_with_a_line(program, tmp_path):
    (tmp_path / "absl.py").write_text(WAITS)  # which all of them import
    words = [program] if program == "train.py" else ["-m", program]
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, text=True, stderr=subprocess.PIPE,
        env=environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "REACHED": f"{tmp_path}/reached"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    while not (tmp_path / "reached").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300)[1] == f"{program}: interrupted\n" and process.returncode == 130


def test_from_the_start_of_the_command_on_it_is_an_exception_again():
    """A training saves a checkpoint then."""
    before = signal.signal(signal.SIGINT, end_at_once)
    try:
        with command.shell("x") as ending:
            signal.raise_signal(signal.SIGINT)
        assert ending.code == 130 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("words", [["train.py"], ["-m", "mine.data"]])
def test_another_program_keeps_its_own(words, tmp_path):
    (tmp_path / "mine").mkdir()
    for path in (tmp_path / "train.py", tmp_path / "mine" / "data.py"):
        path.write_text("import signal, common, model_zoo\n"
                        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n")
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment(), text=True, capture_output=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert done.stdout == "True\n", done.stderr
