"""Atomic file writes, strict JSON, fsync, and locks on files and folders."""
import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

MEMORY = "/dev/shm"


def write_atomically(path, content: str | bytes, durable: bool = False) -> None:
    """Writes a file atomically: writes a temporary file, then renames it.

    durable: calls fsync before the rename, so that after a power failure the file is either the old or the new one.
    """
    scratch = Path(f"{path}.part")
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        if durable:
            flush(scratch)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def append(path, text: str) -> None:
    """Appends text to a file, or leaves the file as it was and raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size, rest = os.fstat(descriptor).st_size, text.encode()
        try:
            while rest:
                rest = rest[os.write(descriptor, rest):]
        except OSError as error:
            os.ftruncate(descriptor, size)
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def write_json(path, content, durable: bool = False) -> None:
    write_atomically(path, as_json(content, indent=1) + "\n", durable)


def as_json(content, indent=None) -> str:
    """Returns content as strict JSON. Numbers in dicts and lists that are not finite, such as a loss, become null."""
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
def locked(path, wait: bool = False) -> Iterator[None]:
    """Context manager that locks a file or a folder. The lock also ends with the process, however it exits.

    wait: wait until the lock is free. Otherwise a taken lock raises BlockingIOError. If the file system has no locks,
    `wait` raises OSError; otherwise nothing is locked.
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


def in_memory(size: int) -> str | None:
    """Returns a folder in memory with ample room for files of `size` bytes in all, or None if there is none.

    Many small files are created and deleted faster there than on a disk.
    """
    return MEMORY if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 10 * size else None
