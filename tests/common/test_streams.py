"""Readers that end, full disks and closed streams. Programs run under a shell, as users redirect them."""
import json
import os
import pty
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import DIGITS, ROOT, TINY, TRAIN, environment, warm_python

from common import streams
from common.streams import Unwritten
from launch.horovodrun import Running

# Its result is a line. It opens a file before a library prints, which does not mind errors.
PROGRAM = """
import contextlib, os, sys
from common import command
with command.shell("program") as ending, command.json_only_on_stdout():
    with open(sys.argv[1], "w"):
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"library\\n")
    print("message", file=sys.stderr)
    command.output("result")
    for _ in range(9):
        print("more", file=sys.stderr)
sys.exit(ending.code)
"""
BEFORE = "library\nlibrary\nmessage\n"
LOST = BEFORE + "program: standard output cannot be written: "


def without_reader() -> int:
    """A pipe whose reader has ended."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def shell(command: str, *arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-c", command, "", *arguments], cwd=ROOT, env=environment(), text=True,
                          capture_output=True, timeout=300, **options)


@pytest.mark.parametrize(("redirected", "code", "stdout", "stderr"), [
    ("", 0, "result\n", BEFORE + 9 * "more\n"),
    ("2>&-", 0, "result\n", ""),
    ("<&- 2>&-", 0, "result\n", ""),
    ("2>/dev/full", 0, "result\n", ""),
    ("2>&{gone}", 0, "result\n", ""),
    (">&-", 1, "", LOST + "bad file descriptor\n"),
    (">/dev/full", 1, "", LOST + "no space left on device\n"),
    (">&{gone}", 1, "", BEFORE),  # a reader that ends, ends it quietly
    ("<&- >&- 2>&-", 1, "", ""),
    (">/dev/full 2>/dev/full", 1, "", ""),
    (">&{gone} 2>&{gone}", 1, "", ""),
])
def test_a_result_is_written_or_missed_whatever_becomes_of_messages(redirected, code, stdout, stderr, tmp_path):
    gone = without_reader()
    done = shell(f'"$@" {redirected.format(gone=gone)}', sys.executable, "-c", PROGRAM, tmp_path / "file",
                 pass_fds=[gone])
    os.close(gone)
    assert (done.returncode, done.stdout, done.stderr) == (code, stdout, stderr)
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(("opened", "message"), [
    (without_reader, ""),
    (lambda: os.open("/dev/full", os.O_WRONLY), "standard output cannot be written: no space left on device"),
    (lambda: os.open(os.devnull, os.O_RDONLY), "standard output cannot be written: bad file descriptor")])
def test_output_raises_once_and_what_is_left_in_its_buffer_does_not(opened, message, monkeypatch):
    monkeypatch.setattr(streams.Output, "is_kept", False)
    with streams.text(streams.Output(opened(), "w")) as output:
        with pytest.raises(Unwritten) as raised:
            print("result", file=output)
        assert str(raised.value) == message
        print("more", file=output)


def test_output_that_a_file_has_too_may_be_lost(monkeypatch):
    monkeypatch.setattr(streams.Output, "is_kept", True)
    with streams.text(streams.Output(without_reader(), "w")) as output:
        print("result", file=output)


@pytest.mark.parametrize("stream", [streams.Output, streams.Errors])
def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_everything(stream):
    """More than a pipe holds, as another program that shares it may have set it up."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def read(received=b""):
        while part := os.read(reading, 20_000):
            received += part
            time.sleep(0.002)
        return received

    text = "".join(f"{number}\n" for number in range(40_000))
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(read)
        with streams.text(stream(writing, "w")) as output:
            print(text, end="", file=output)
        assert len(text) > 200_000 and received.result() == text.encode()
    os.close(reading)


def test_messages_are_dropped_after_a_moment_if_nobody_reads_a_pipe_that_does_not_block(monkeypatch):
    monkeypatch.setattr(streams.Errors, "problem", "")
    monkeypatch.setattr(streams.Errors, "patience", 100)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with streams.text(streams.Errors(writing, "w")) as errors:
        began = time.monotonic()
        for _ in range(50):
            print("x" * 70_000, file=errors)
        assert 0.1 <= time.monotonic() - began < 1
    assert streams.Errors.problem == "its reader is too slow"
    os.close(reading)


def test_help_to_a_full_disk_is_one_line():
    done = shell('"$@" >/dev/full', sys.executable, "-m", "reporting.report", "--help")
    assert (done.returncode, done.stderr) == (1, "reporting.report: standard output cannot be written: no space "
                                                 "left on device\n")


def test_workers_do_not_wait_for_a_reader_that_has_ended(monkeypatch):
    """More than a pipe holds. They would be killed after 20 s."""
    monkeypatch.setattr(streams.Output, "is_kept", True)
    with streams.text(streams.Output(without_reader(), "w")) as output:
        words = ["timeout", "20", "bash", "-c", "for i in {1..4000}; do echo '[0]<stdout>:a line of rank 0'; done"]
        assert Running(words, output, "localhost").wait() == 0


@pytest.mark.trainings
def test_a_training_outlives_the_reader_of_its_messages(tmp_path):
    """The disk of its standard error is full, or one who reads both streams ends after three lines."""
    for name, redirected in (("reader", "2>&1 | head -n 3; exit ${PIPESTATUS[0]}"), ("disk", "2>/dev/full")):
        folder = tmp_path / name
        done = shell(f'"$@" {redirected}', warm_python(), TRAIN, DIGITS, *TINY, "--epochs=2", f"--output_dir={folder}")
        summary = json.loads((folder / "summary.json").read_text())
        assert done.returncode == 0 and not done.stderr and summary["epochs"] == 2
        assert (folder / "checkpoints" / "checkpoint").exists()
        if name == "disk":
            assert json.loads(done.stdout) == summary
        else:
            assert len(done.stdout.splitlines()) == 3
        told = json.loads((folder / "run.json").read_text())["standard_error"]
        assert told == "partly lost: " + {"disk": "no space left on device", "reader": "broken pipe"}[name]
        assert "In progress" not in (folder / "report.html").read_text()


@pytest.mark.trainings
def test_a_closed_terminal_ends_a_training(tmp_path):
    """By SIGHUP, as it ends other programs: what is written to it would be dropped."""
    process, terminal = pty.fork()
    if not process:
        os.execv(sys.executable, [sys.executable, TRAIN, DIGITS, *TINY, "--epochs=500", f"--output_dir={tmp_path}"])
    shown = b""
    while b"epoch 1/" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGHUP
