"""Atomic file writes, and locks on folders."""
import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path


def write_whole(path, text: str, durable: bool = False) -> None:
    """Writes a file atomically: writes a temporary file, then renames it.

    durable: also calls fsync, to survive a power failure.
    """
    scratch = Path(f"{path}.part")
    scratch.write_text(text)
    if durable:
        flush(scratch)
    scratch.replace(path)


def write_json(path, content, durable: bool = False) -> None:
    write_whole(path, as_json(content, indent=1) + "\n", durable)


def as_json(content, indent=None) -> str:
    """Returns content as strict JSON. Numbers that are not finite, such as a diverged loss, become null."""
    def finite(value):
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(content), indent=indent, allow_nan=False)


def flush(path) -> None:
    """Calls fsync on a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held(path, wait: bool = False) -> Iterator[None]:
    """Locks a file or a folder if its file system supports locks. The lock ends with the process, however it exits.

    wait: whether to wait until the lock is free. Otherwise a taken lock raises BlockingIOError.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:  # this file system has no locks
            if wait:
                raise
        yield
    finally:
        os.close(descriptor)
