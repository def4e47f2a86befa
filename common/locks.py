"""Locks whose files name their holder, so that who finds one taken can say by whom."""
import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from common import files
from common.errors import complain

LOCK = ".lock"  # the file in a folder by which it is locked
PATIENCE = 60  # seconds without a word


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    host: str
    pid: int
    job: str  # its Slurm job, or ""
    start: str  # how often Slurm has requeued the job

    def __str__(self):
        return f"process {self.pid} on {self.host}" + (f", Slurm job {self.job}" if self.job else "")

    def may_be_lost(self) -> bool:
        """Whether the holder may have ended without freeing the lock, as far as this process can know.

        It may if its host is another one, or if it is an earlier start of this process's Slurm job.
        """
        here = this_process()
        return self.host != here.host or (bool(self.job) and self.job == here.job and self.start != here.start)


class Taken(BlockingIOError):
    """A lock is taken. Its only argument is the holder, or a text while the lock's file is being written."""


def this_process() -> Holder:
    return Holder(socket.gethostname(), os.getpid(), os.environ.get("SLURM_JOB_ID", ""),
                  os.environ.get("SLURM_RESTART_COUNT", "0"))


@contextlib.contextmanager
def locked(file: Path, wait: bool = False, needed: bool = False) -> Iterator[None]:
    """Context manager that locks a file, which is created if it is missing. The lock also ends with the process.

    wait: wait until the lock is free; after PATIENCE, a line names its holder. Otherwise a taken lock raises Taken.
    needed: as in files.locked.
    """
    with contextlib.ExitStack() as held:
        watch = threading.Timer(PATIENCE, lambda: complain(f"waiting for {_holder(file)}, which has locked {file}"))
        watch.daemon = True
        held.callback(watch.cancel)
        if wait:
            watch.start()
        try:
            descriptor = held.enter_context(files.locked(file, wait, needed))
        except BlockingIOError:
            raise Taken(_holder(file)) from None
        watch.cancel()
        if descriptor is not None:
            with contextlib.suppress(OSError):  # the disk is full
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(this_process())).encode(), 0)
                os.fsync(descriptor)
        yield


def _holder(file: Path) -> Holder | str:
    """Returns the holder in the lock's file, or a text while it is being written."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Holder(**json.loads(file.read_text()))
    return "unknown"
