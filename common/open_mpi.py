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
    """Context manager in which MPI starts. Until this process exits, its shared memory is in a folder of its own.

    In /dev/shm itself, Open MPI 5 names the file after the host, the user, the rank and a hash of the job with 16 bits.
    Jobs whose hashes are equal write into each other's messages: one pair of 65,536, and containers that share /dev/shm
    and the host's name if mpirun has the same process number in both.
    """
    # A thread that waits in Open MPI yields its core to threads that compute, instead of spinning.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if not CARDS.exists():
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")  # ofi looks for such a card, and sleeps for a second
    if FOLDER in os.environ:
        yield
        return
    held = contextlib.ExitStack()
    atexit.register(held.close)  # registered first, it runs last: MPI complains if its file is gone
    with contextlib.suppress(OSError):
        os.environ[FOLDER] = str(held.enter_context(scratch_folder(MEMORY)))
    try:
        yield
    finally:
        os.environ.pop(FOLDER, None)  # no child inherits it
