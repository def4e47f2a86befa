"""The lock on a run's folder: only one training writes there.

A network file system frees the lock of a host that is lost only when the host's lease ends. The lock's file therefore
names its holder, and a holder that may be lost is waited for.
"""
import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from common import files
from common.errors import UserError, complain
from plan.run_folder import LOCK

LEASE = 120  # seconds; NFS 4 servers free the locks of a lost host after 90, unless configured otherwise
POLL = 1.0  # seconds


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock. job: its Slurm job, or "". start: how often the job was requeued before."""

    host: str
    pid: int
    job: str
    start: str

    def __str__(self):
        return f"process {self.pid} on {self.host}" + (f", Slurm job {self.job}" if self.job else "")

    def may_be_lost(self) -> bool:
        """Whether the holder's host may be lost, or the holder is an earlier start of this process's Slurm job."""
        here = this_process()
        return self.host != here.host or (bool(self.job) and self.job == here.job and self.start != here.start)


def this_process() -> Holder:
    return Holder(socket.gethostname(), os.getpid(), os.environ.get("SLURM_JOB_ID", ""),
                  os.environ.get("SLURM_RESTART_COUNT", "0"))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager that locks a run's folder. Waits up to LEASE seconds for a holder that may be lost.

    Raises UserError, which names the holder, if another training holds the lock.
    """
    with contextlib.ExitStack() as held:
        descriptor = _wait(held, folder)
        if descriptor is None:
            complain(f"warning: the file system of {folder} has no locks; start no other training run there")
        else:
            with contextlib.suppress(OSError):  # the disk is full
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(this_process())).encode(), 0)
                os.fsync(descriptor)
        yield


def _wait(held, folder) -> int | None:
    """Enters the lock into `held`; returns its descriptor, or None if the file system has no locks."""
    began = time.monotonic()
    announced = None
    while True:
        try:
            return held.enter_context(files.locked(folder / LOCK))
        except BlockingIOError:
            holder = _holder(folder)
        if (holder and not holder.may_be_lost()) or time.monotonic() - began > LEASE:
            raise UserError(f"--output_dir: another training run ({holder or 'unknown'}) writes to {folder}; choose "
                            "another folder, or wait until that run has ended")
        if holder and holder != announced:
            announced = holder
            complain(f"another training run ({holder}) holds the lock on {folder}; waiting for up to {LEASE} s, after "
                     "which the lock of a lost host is free")
        time.sleep(POLL)


def _holder(folder) -> Holder | None:
    """Returns the holder in the lock's file, or None while it is being written."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Holder(**json.loads((folder / LOCK).read_text()))
    return None
