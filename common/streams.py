"""Standard output and standard error whose reader may end, whose disk may be full, or which are closed from the start.

A command does not depend on standard error: what cannot be written there is dropped. Its result is on standard output.
If that cannot be written, the command ends with an error, unless a file has the result, too.

A program that shares a pipe or a terminal may have set it to O_NONBLOCK. What is full then is waited for: standard
output until it has room, as if it blocked, and standard error for a second, and not again.
"""
import contextlib
import ctypes
import errno
import io
import os
import select
import sys
from collections.abc import Iterator

from common.errors import UserError


class Unwritten(UserError):
    """Standard output cannot be written. The message is empty for a closed pipe: `command | head` is no error."""


class Waiting(io.FileIO):
    """A stream that waits until a pipe or terminal has room, also if its descriptor is set to O_NONBLOCK."""

    patience = None  # milliseconds to wait; None: without a limit

    def write(self, data) -> int:
        """Returns the number of bytes written. Raises OSError."""
        room = select.poll()
        room.register(self, select.POLLOUT)
        while (written := super().write(data)) is None:
            if not room.poll(self.patience):
                raise BlockingIOError(errno.EAGAIN, "its reader is too slow")
        return written


class Errors(Waiting):
    """Standard error. It drops what cannot be written."""

    patience = 1000
    problem = ""  # why something was dropped; of the class, because there is one standard error

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            Errors.problem = error.strerror.lower()
            Errors.patience = 0
            return len(data)


class Output(Waiting):
    """Standard output. It raises Unwritten once, and not again for what is left in a buffer."""

    is_kept = False  # whether a file has what is printed, too, so that it may be dropped; set on the class
    has_failed = False

    def write(self, data) -> int:
        try:
            return len(data) if self.has_failed else super().write(data)
        except OSError as error:
            self.has_failed = True
            if self.is_kept:
                return len(data)
            raise Unwritten("" if isinstance(error, BrokenPipeError) else
                            f"standard output cannot be written: {error.strerror.lower()}") from None


def text(raw: io.FileIO) -> io.TextIOWrapper:
    """Returns a text stream. Names of files that are not UTF-8 are escaped, as in JSON."""
    return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)


@contextlib.contextmanager
def redirected(number: int, target: int) -> Iterator[int]:
    """Context manager in which what libraries write to a descriptor goes to another one. Yields a copy of the first."""
    ours = os.dup(number)
    os.dup2(target, number)
    try:
        yield ours
    finally:
        os.dup2(ours, number)
        os.close(ours)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Drops what this process and its libraries print on standard error."""
    with open(os.devnull, "w") as nothing, redirected(2, nothing.fileno()):
        yield


def close_cout() -> None:
    """Drops what C++ libraries print on std::cout, unless the environment asks for TensorFlow's or Horovod's messages.

    DALI's plugin for TensorFlow prints each error there, with a stack trace, before TensorFlow raises it. Call this
    after a library has been loaded that creates the stream.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "3" and "HOROVOD_LOG_LEVEL" not in os.environ:
        library = ctypes.CDLL("libstdc++.so.6")
        cout = ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout"))
        table = ctypes.c_void_p.from_address(cout).value  # of virtual functions; before it is the offset of the base
        base = cout + ctypes.c_ssize_t.from_address(table - 24).value
        library._ZNSt9basic_iosIcSt11char_traitsIcEE5clearESt12_Ios_Iostate(ctypes.c_void_p(base), 1)  # sets badbit


def secure() -> None:
    """Replaces Python's standard streams by those above.

    Opens those that are closed: otherwise the next file that is opened gets the number of one, and what a library
    prints is written to it.
    """
    for descriptor, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):  # a result still cannot be written
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)
    if sys.stdout is sys.__stdout__:
        sys.stdout = text(Output(1, "w", closefd=False))
    if sys.stderr is sys.__stderr__:
        sys.stderr = text(Errors(2, "w", closefd=False))
