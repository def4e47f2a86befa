"""Runs train.py in processes of its own, for programs that train. The processes end with the program.

A folder with a result is not trained again.
"""
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from absl import flags as absl_flags

from common import SAVING, TRAIN, flags, metric
from common.errors import ExitCode, Stopped, UserError
from common.launcher import end_with_parent
from common.run_folder import RUN, RunFolder, top1_of
from plan import flags as train_flags
from reporting.run_data import validation_set


@dataclass(frozen=True)
class Result:
    """The result of a run that has ended. Its fields are columns of sweep.json."""

    val_top1: float  # after the last epoch; of a run that diverged, the accuracy of guessing, 1 / classes
    ema_val_top1: float | None  # that of the moving average of the weights if there is one
    best_top1: float  # the highest of all evaluations, of the moving average if there is one
    best_epoch: float | None  # epoch of best_top1
    seconds: float  # duration of the run, with the start of its process if that is known
    diverged_at: dict | None  # step and epoch at which training diverged, or ended below --expect
    reported: str | None = None  # result in the paper of its recipe
    val_samples: int | None = None  # number of validation images; None if it diverged
    val_guess_count: int | None = None  # number of those of the most frequent class; None if it diverged
    below_expected: bool | None = None  # whether it has not diverged, but ended below --expect
    advice: list[str] | None = None  # sentences on what to try
    validation: dict | None = None  # identifies the validation set; see reporting.run_data.validation_set

    @classmethod
    def read(cls, folder: Path) -> "Result | None":
        """Returns the result of the run in a folder, or None if there is no run or it has not ended."""
        files = RunFolder(folder, reader="experiments.sweep")
        ending = files.ending()
        if not ending:
            return None
        run = files.read(RUN)
        top1 = top1_of(ending) if ending.get("diverged") else ending[metric.VAL_TOP1]
        return cls(**{field.name: ending.get(field.name) for field in fields(cls)} | {
            "val_top1": top1, "best_top1": ending.get("best_top1", top1), "validation": validation_set(run),
            "reported": (run.get("recipe") or {}).get("reported")})


def train_once(folder: Path, words: Sequence[str]) -> Result:
    """Returns the result of the run in a folder, which it trains, or continues from its checkpoints, if there is none.

    words: flags of train.py, without --output_dir. The output is appended to FOLDER.log. A run that diverged has a
    result. Raises UserError if training fails, and Stopped after a request to stop.
    """
    result = Result.read(folder)
    if result:
        return result
    log, clock = folder.with_name(f"{folder.name}.log"), time.monotonic()
    with open(log, "ab") as output:
        began = output.tell()
        process = started([sys.executable, TRAIN, *words, f"--output_dir={folder}"], stderr=output)
        with stops_passed_on(process) as received:
            code = process.wait()
    if received or code == ExitCode.STOPPED:
        raise Stopped(f"{folder.name} was stopped on request; the same command continues")
    result = Result.read(folder)
    if result:
        return replace(result, seconds=max(result.seconds, time.monotonic() - clock))
    problem = f"{signal.Signals(-code).name} killed it" if code < 0 else problem_in(log, began) or f"exit code {code}"
    raise UserError(f"{folder.name} failed: {problem}; its output is in {log}")


def help_of(options: type) -> list[str]:
    """Returns the help on the flags of a dataclass, for a program that also takes those of train.py."""
    return [*flags.described(flags.define(options)), "`uv run train.py --helpfull` lists the flags of train.py."]


def passed_on(values: absl_flags.FlagValues, options: type) -> list[str]:
    """Returns the flags of train.py that are on the command line of another program. options: that program's own."""
    ours = {*flags.names(options)}
    return [line for group in train_flags.GROUPS.values() for name in flags.names(group)
            if name not in ours and values[name].present for line in values[name].serialize().splitlines()]


def started(words: Sequence, **options) -> subprocess.Popen:
    """Starts a training, which is killed if this program is. words: a command line. options: of Popen."""
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            preexec_fn=lambda: end_with_parent(signal.SIGKILL), **options)


@contextlib.contextmanager
def stops_passed_on(process: subprocess.Popen) -> Iterator[list[int]]:
    """Context manager that forwards SIGTERM and other requests to stop to a training, which then saves a checkpoint.

    Yields the list of requests. The caller reads it after the training, because a request that comes too late for this
    training still has to prevent the next one.
    """
    received = []

    def pass_on(number, _):
        received.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SAVING}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def problem_in(log: Path, began: int) -> str:
    """Returns the error in a log from byte `began` on: the last line that starts with train.py, or the last one."""
    lines = log.read_bytes()[began:].decode(errors="replace").strip().splitlines()
    named = [line for line in lines if line.startswith("train.py: ")]
    return next(reversed(named or lines), "").removeprefix("train.py: ")
