"""What a process does before Open MPI starts in it. A variable of the caller's takes precedence."""
import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from common.errors import UserError, complain_of
from common.files import MEMORY, scratch_folder
from common.launcher import LAUNCHERS, launched, uses_gloo

FOLDER = "OMPI_MCA_btl_sm_backing_directory"
CARDS = Path("/sys/class/infiniband")  # RDMA network cards: InfiniBand, RoCE or EFA
BTL, WITHOUT_OFI = "OMPI_MCA_btl", "^ofi"  # ofi looks for such a card, and sleeps for a second
SELECTIONS = BTL, "OMPI_MCA_coll", "OMPI_MCA_mtl", "OMPI_MCA_osc", "OMPI_MCA_pml"  # Open MPI's parts, for messages
FILES = "OMPI_MCA_mca_base_param_files"
PATIENCE = 30  # seconds in which MPI starts in one process


@contextlib.contextmanager
def configured() -> Iterator[None]:
    """Context manager in which MPI starts. Until this process exits, its shared memory is in a folder of its own.

    In /dev/shm itself, Open MPI 5 names the file after the host, the user, the rank and a hash of the job with 16 bits.
    Jobs whose hashes are equal write into each other's messages: one pair of 65,536, and containers that share /dev/shm
    and the host's name if mpirun has the same process number in both.

    Raises UserError if MPI cannot start because of the parts of Open MPI that are selected here.
    """
    # A thread that waits in Open MPI yields its core to threads that compute, instead of spinning.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if not CARDS.exists():
        os.environ.setdefault(BTL, WITHOUT_OFI)
    check(selected())
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


@contextlib.contextmanager
def ended_together() -> Iterator[None]:
    """Context manager of what one rank alone checks before MPI starts. Its error ends it once MPI has started in all.

    When a rank ends, mpirun kills the others. An mpirun that kills one in MPI_Init may hang, or crash.
    """
    try:
        yield
    except (UserError, OSError) as error:
        if launched().size > 1 and not uses_gloo():
            complain_of(error)
            error.parts = ()  # they have been said
            with configured():
                import mpi4py

                mpi4py.rc.finalize = False  # it would wait for the others
                from mpi4py import MPI  # noqa: F401 starts MPI
        raise


def selected() -> dict[str, str]:
    """Returns the parts that a user or a site has selected: VARIABLE=VALUE -> the file that does it, or nothing.

    mpirun passes what the files say to its workers as variables.
    """
    found = {f"{name}={os.environ[name]}": "" for name in SELECTIONS if name in os.environ}
    installed = os.environ.get("OPAL_PREFIX") or Path(shutil.which("mpirun") or sys.executable).parents[1]
    default = f"{os.path.expanduser('~')}/.openmpi/mca-params.conf,{installed}/etc/openmpi-mca-params.conf"
    for file in os.environ.get(FILES, default).replace(":", ",").split(","):
        with contextlib.suppress(OSError):
            for line in Path(file).read_text("latin-1").splitlines():
                name, value = map(str.strip, line.partition("=")[::2])
                if os.environ.get(variable := f"OMPI_MCA_{name}", value) == value and variable in SELECTIONS:
                    found[f"{variable}={value}"] = file
    found.pop(f"{BTL}={WITHOUT_OFI}", None)
    return found


def check(settings: Mapping[str, str]) -> None:
    """Raises UserError if MPI cannot start because of these settings; see `selected`.

    Open MPI ends a process in which it cannot start, and mpirun may then hang. So other processes try it before.
    """
    if not settings or _starts() or not _starts([]):
        return
    if launched().local_rank:
        time.sleep(PATIENCE)  # the launcher ends this worker when the first one of its host has spoken and ended
    guilty = [one for one in settings if not _starts([one])] or [*settings]
    cures = [f"remove it from {settings[one]}" if settings[one] else f"unset {one.partition('=')[0]}" for one in guilty]
    raise UserError(f"MPI does not start with {' and '.join(guilty)}: this Open MPI, or this host's network, lacks "
                    f"what that needs; {' and '.join(cures)}")


def _starts(settings: Iterable[str] | None = None) -> bool:
    """Whether MPI starts in another process, with these settings alone, or with those that are there."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    if settings is not None:
        variables = {name: value for name, value in variables.items() if name not in SELECTIONS}
        variables |= {FILES: os.devnull, BTL: WITHOUT_OFI} | dict(one.split("=", 1) for one in settings)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], env=variables, capture_output=True,
                              stdin=subprocess.DEVNULL, timeout=PATIENCE).returncode == 0
    return False
