"""Errors that a user can fix, and the exit codes of all commands."""
import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from enum import IntEnum

from common import command_of


class ExitCode(IntEnum):
    """Exit codes of all commands. STOPPED is EX_TEMPFAIL of sysexits.h: run the same command again."""

    DONE = 0
    WRONG = 1
    USAGE = 2
    STOPPED = 75
    INTERRUPTED = 130


_command = command_of(sys.modules["__main__"]) or "bigbatch"  # with which the messages of this process begin


class UserError(Exception):
    """The request cannot be carried out. The message says what is wrong and what to do.

    parts: of the message. A terminal has each in a line of its own. on_all_ranks: whether every rank raises the error
    at the same point.
    """

    exit_code = ExitCode.WRONG

    def __init__(self, *parts, on_all_ranks: bool = False):
        super().__init__("; ".join(map(str, parts)))
        self.parts = parts
        self.on_all_ranks = on_all_ranks


class UsageError(UserError):
    """A flag is unknown or malformed, or its value is not allowed."""

    exit_code = ExitCode.USAGE


class Stopped(UserError):
    """Training stopped, on all ranks, after writing a checkpoint.

    next_workers: the number of workers on which it is to continue, or None if it stopped on request.
    """

    exit_code = ExitCode.STOPPED

    def __init__(self, message, next_workers: int | None = None):
        super().__init__(message, on_all_ranks=True)
        self.next_workers = next_workers


@contextlib.contextmanager
def messages_of(command: str) -> Iterator[None]:
    """Context manager in which the messages of this process begin with the name of a command."""
    global _command
    before, _command = _command, command
    try:
        yield
    finally:
        _command = before


def complain(message, source: str | None = None) -> None:
    """Prints one line on standard error. source: what the line begins with. Default: the name of the command."""
    print(f"{source or _command}: {message}", file=sys.stderr, flush=True)


def complain_of(error) -> None:
    """Prints the message of an error, each of its parts in a line."""
    for part in getattr(error, "parts", [error]):
        if line := one_line(part):
            complain(line)


def full_disk(error) -> int | None:
    """Returns ENOSPC or EDQUOT if an error is that of a full disk or quota, perhaps in TensorFlow's words, or None."""
    return next((number for number in (errno.ENOSPC, errno.EDQUOT)
                 if getattr(error, "errno", None) == number or os.strerror(number) in str(error)), None)


def one_line(error) -> str:
    """Returns the message of an error in one line, in plain words for a full disk and for other errors of files."""
    text = " ".join(str(error).split())
    if full := full_disk(error):
        where = f"{error.filename}: " if getattr(error, "filename", None) else ""
        problem = os.strerror(full)
        return f"{where}{problem[0].lower()}{problem[1:]}; make room and run the same command again to continue"
    path = getattr(error, "filename", None)
    if isinstance(error, FileExistsError) and path and os.path.lexists(path) and not os.path.isdir(path):
        return f"{path} is " + (
            "no folder; choose another one" if os.path.exists(path) else
            f"a link to {os.readlink(path)}, which does not exist; create that folder, or remove the link")
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return text


def shown(name: str) -> str:
    """Returns the name of a file with its bytes that are not UTF-8 escaped."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def in_list(name: str) -> str:
    """Returns a name as it stands in a list with commas: quoted if it has a comma itself, or invisible letters."""
    return name if name.isprintable() and "," not in name else repr(name)


def listed(words: Sequence[str], most: int, separator: str = ", ", what: str = "") -> str:
    """Returns the first words of a list and the number of the others, for a message. what: the others, such as files.
    """
    more = f" and {len(words) - most} more{what and f' {what}'}" if len(words) > most else ""
    return separator.join(words[:most]) + more


def plural(count: float, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def reason(error) -> str:
    """Returns the line of a TensorFlow error that says what happened, in TensorFlow or in DALI."""
    where = ("Graph execution error", "Detected at node", "File ", "[[", "<stack traces")  # in the graph or in Python
    lines = [line.strip() for line in str(error).splitlines() if "Critical error" not in line]
    lines = [line for line in lines if line and not line.startswith(where)] or [type(error).__name__]
    telling = ("rror in", "ssert", "No space left", "quota exceeded", "outside the valid range")
    return next((line for line in lines if any(word in line for word in telling)), lines[0])[:300]
