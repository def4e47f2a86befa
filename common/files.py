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


def write_atomically(path, text: str, durable: bool = False) -> None:
    """Writes a file atomically: writes a temporary file, then renames it.

    durable: calls fsync before the rename, so that after a power failure the file is either the old or the new one.
    """
    scratch = Path(f"{path}.part")
    scratch.write_text(text)
    if durable:
        flush(scratch)
    scratch.replace(path)


def write_json(path, content, durable: bool = False) -> None:
    write_atomically(path, as_json(content, indent=1) + "\n", durable)


def read_rows(path: Path) -> list[dict]:
    """Returns the rows of a complete log with one JSON object per line, or none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


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
def locked(path, wait: bool = False) -> Iterator[int | None]:
    """Context manager that locks a folder or a file. The lock also ends with the process, however it exits.

    It yields the descriptor of the locked file, which is created if it is missing. NFS locks only files that are open
    for writing for all hosts; a folder's lock counts on its own host.

    wait: wait until the lock is free. Otherwise a taken lock raises BlockingIOError. If the file system has no locks,
    `wait` raises OSError; otherwise nothing is locked, and None is yielded.
    """
    descriptor = os.open(path, os.O_RDONLY if os.path.isdir(path) else os.O_RDWR | os.O_CREAT, 0o666)
    is_locked = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:  # this file system has no locks
            if wait:
                raise
            is_locked = False
        yield descriptor if is_locked else None
    finally:
        os.close(descriptor)


def in_memory(size: int) -> str | None:
    """Returns a folder in memory with ample room for files of `size` bytes in all, or None if there is none.

    Many small files are created and deleted faster there than on a disk.
    """
    return MEMORY if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 10 * size else None
