"""Standard output and standard error whose reader may end, whose disk may be full, or which are closed from the start.

A command does not depend on standard error: what cannot be written there is dropped. Its result is on standard output.
If that cannot be written, the command ends with an error, unless a file has the result, too.
"""
import io
import os
import sys

from common.errors import UserError

_output: "_Raw | None" = None
_error: "_Raw | None" = None


class Unwritten(UserError):
    """Standard output cannot be written. If its reader has ended, there is no message, because nobody is to be told."""


class _Raw(io.FileIO):
    """A descriptor. is_needed: whether the first failure raises Unwritten. problem: why it could not be written."""

    is_needed = False
    problem = ""

    def write(self, data) -> int | None:
        try:
            if not (self.is_needed and self.problem):  # a later success would leave a gap
                written = super().write(data)
                return written if self.is_needed else written or len(data)  # None: it would block
        except OSError as error:
            self.problem = error.strerror.lower()
            if self.is_needed:
                raise Unwritten("" if isinstance(error, BrokenPipeError) else
                                f"standard output cannot be written: {self.problem}") from None
        return len(data)


def secure() -> None:
    """Replaces Python's standard streams by those described above.

    Opens those that are closed: otherwise the next file that is opened gets the number of one, and what a library
    prints is written to it.
    """
    global _error
    for descriptor, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):  # a result still cannot be written
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)
    if sys.stdout is sys.__stdout__:
        sys.stdout = output(1)
    if sys.stderr is sys.__stderr__:
        _error = _Raw(2, "w", closefd=False)
        sys.stderr = _text(_error)


def output(descriptor: int) -> io.TextIOWrapper:
    """Returns a stream for results. It raises Unwritten once, and closes the descriptor unless it is a standard one."""
    global _output
    _output = _Raw(descriptor, "w", closefd=descriptor > 2)
    _output.is_needed = True
    return _text(_output)


def output_is_kept() -> None:
    """A file has what is printed, too. From now on, what standard output cannot take is dropped."""
    if _output:
        _output.is_needed = False


def problem_of_error() -> str:
    """Returns why standard error could not be written, or an empty text."""
    return _error.problem if _error else ""


def _text(raw: _Raw) -> io.TextIOWrapper:
    """Returns a text stream. Names of files that are not UTF-8 are escaped, as in JSON."""
    return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)
