"""What a process sets for Open MPI before MPI starts in it. A variable of the caller's takes precedence."""
import atexit
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from common.files import MEMORY, scratch_folder

FOLDER = "OMPI_MCA_btl_sm_backing_directory"
CARDS = Path("/sys/class/infiniband")  # RDMA network cards: InfiniBand, RoCE or EFA


@contextlib.contextmanager
def configured() -> Iterator[None]:
    """Context manager in which MPI starts.

    Each process has its shared memory in a folder of its own, until it exits. In /dev/shm itself, Open MPI 5 names it
    after the host, the rank and 16 bits of a hash of the job: two jobs in 65,536, and any two containers that share
    /dev/shm, a host name and a number of mpirun's process, would write into each other's messages.
    """
    # A thread that waits in Open MPI yields its core to threads that compute, instead of spinning.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if not CARDS.exists():
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")  # ofi looks for such a card, and sleeps for a second
    with contextlib.ExitStack() as held, contextlib.ExitStack() as started:
        if FOLDER not in os.environ:
            with contextlib.suppress(OSError):
                os.environ[FOLDER] = str(held.enter_context(scratch_folder(MEMORY)))
                started.callback(os.environ.pop, FOLDER)  # no child inherits it
        atexit.register(held.pop_all().close)  # before the caller's: Open MPI complains if it finds its file gone
        yield
