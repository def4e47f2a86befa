"""What all commands share: errors as one line and an exit code, help, and standard output reserved for JSON."""
import contextlib
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from common import SAVING, end_at_once, launcher, streams
from common.errors import ExitCode, UserError, complain, complain_of, messages_of
from common.version import version

# TensorFlow loads Keras, which would take the layout of images, the dtype and epsilon from a user's keras.json, or stop
# because that says bfloat16. No file lies under /dev/null. The other variable asks for a package that is not there.
PLAIN_KERAS = {"KERAS_HOME": os.devnull, "TF_USE_LEGACY_KERAS": "0"}
USERS_KERAS_HOME = "BIGBATCH_KERAS_HOME"  # the user's KERAS_HOME, for the weights in it; also in programs started here
# With Python's own, 700, 10 and 10, it looks for cycles for 0.6 s while TensorFlow is imported; with these, for 0.3 s.
COLLECTIONS = 20_000, 10, 10
_output = None  # the stream of `output` where sys.stdout is another


def program(name: str, doc: str | None = None, described: Callable[[Sequence[str]], Iterable[str]] = lambda argv: (),
            barrier: Callable[[], None] = lambda: None, prints: bool = True, is_alone: bool = False) -> Callable:
    """Decorator that makes the `main` of a program: a function of the command line that returns the exit code.

    --help prints `doc` and what `described` returns for the command line, such as a line per flag. --version prints the
    version. Otherwise the decorated function runs in `shell`. It returns an exit code; None is 0.

    name: of the command, with which its messages begin.
    barrier: as in `shell`.
    prints: whether this process prints help, version and errors.
    is_alone: whether it is an error if a launcher starts several processes. Other programs end with their launcher.
    """
    def decorator(run: Callable[[Sequence[str]], int | None]) -> Callable[[Sequence[str]], int]:
        @functools.wraps(run)
        def main(argv: Sequence[str]) -> int:
            with shell(name, barrier, prints) as ending:
                if not asks_for_help(argv) and "--version" not in argv[1:]:
                    launcher.check_alone() if is_alone else launcher.end_with_launcher()
                    ending.code = run(argv) or ExitCode.DONE
                elif prints:
                    lines = [doc, *described(argv)] if asks_for_help(argv) else [f"bigbatch {version()}"]
                    print(*filter(None, lines), sep="\n")  # `python -OO` has no doc
            return ending.code

        return main

    return decorator


@dataclass
class Ending:
    """The exit code with which a command will end. `shell` yields it and sets it after an error."""

    code: int = ExitCode.DONE


@contextlib.contextmanager
def shell(program: str, barrier: Callable[[], None] = lambda: None, prints: bool = True) -> Iterator[Ending]:
    """Context manager that turns UserError, OSError and Ctrl-C into a line on standard error and an exit code.

    The exit code is that of the error's class (common.errors). Other errors keep their traceback, and Python's exit
    code is 1. A command whose standard output is a pipe that its reader has closed ends without a line
    (common.streams).

    barrier: waits for the other ranks after an error that all of them raise, because mpirun kills all when one exits.
    prints: whether this process prints the line.
    """
    streams.secure()
    if sys.flags.optimize > 1 and not asks_for_help(sys.argv):
        complain("TensorFlow does not load without docstrings, which PYTHONOPTIMIZE=2 and python -OO remove; unset "
                 "PYTHONOPTIMIZE", program)
        sys.exit(ExitCode.WRONG)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # hides TensorFlow's startup messages
    os.environ.setdefault(USERS_KERAS_HOME, os.environ.get("KERAS_HOME", ""))
    os.environ |= PLAIN_KERAS
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")  # UCX takes SIGHUP, with which a closed terminal ends a command
    gc.set_threshold(*COLLECTIONS)
    ending = Ending()
    problem = None
    with messages_of(program):
        try:
            if signal.getsignal(signal.SIGINT) is end_at_once:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            yield ending
            sys.stdout.flush()
        except (UserError, OSError) as error:
            problem = error
            ending.code = getattr(error, "exit_code", ExitCode.WRONG)
        except KeyboardInterrupt as interrupt:
            problem = str(interrupt) or "interrupted"
            ending.code = ExitCode.INTERRUPTED
        if problem and prints:
            complain_of(problem)
        if getattr(problem, "on_all_ranks", False):
            with contextlib.suppress(Exception):  # a rank may have exited already, or Horovod may not have started
                barrier()


def end(code: int) -> NoReturn:
    """Ends this process with an exit code after the command is done, and ignores requests to stop from then on.

    Python gives signals their default actions back before it frees TensorFlow and waits in MPI for the other ranks. A
    signal that came then would kill a worker that has saved its checkpoint, and the job would seem to have failed.
    """
    for number in SAVING:
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # keeps Python's last collections from walking through all of TensorFlow, which takes 0.6 s
    sys.exit(code)


def asks_for_help(argv: Sequence[str]) -> bool:
    return bool({"--help", "-help", "-h", "--helpfull", "-helpfull"} & set(argv[1:]))


def table(rows: Sequence[dict[str, str]], align: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Returns the lines of a table for a terminal, the names of its columns first. align: str.ljust or str.rjust."""
    cells = [[*rows[0]], *([*row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(align, line, widths)).rstrip() for line in cells]


def is_read_by_a_person() -> bool:
    """Whether standard output is a terminal. mpirun gives its processes one, too, but only for standard output."""
    return (_output or sys.stdout).isatty() and sys.stderr.isatty()


def output(*lines: str) -> None:
    """Prints lines on standard output, also while `json_only_on_stdout` reserves it."""
    print(*lines, sep="\n", file=_output or sys.stdout, flush=True)


@contextlib.contextmanager
def json_only_on_stdout() -> Iterator[None]:
    """Reserves standard output for what this program prints with `output`.

    What libraries (such as NCCL) and the user's own code print there goes to standard error.
    """
    global _output
    sys.stdout.flush()
    try:
        with (streams.redirected(1, 2) as ours, streams.text(streams.Output(os.dup(ours), "w")) as _output,
              contextlib.redirect_stdout(sys.stderr)):
            yield
    finally:
        _output = None
