"""Reads the environment variables that a launcher sets for a worker, before Horovod is loaded."""
import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path

from common.errors import UsageError, UserError
from common.threads import start_service

PR_SET_PDEATHSIG = 1  # prctl(2)
ELASTIC = "HOROVOD_ELASTIC"  # set by horovodrun if workers may come and go
NODES = "HOROVOD_CROSS_SIZE"
CONTROLLER = "HOROVOD_CONTROLLER"  # set to gloo by horovodrun --gloo; Horovod then does without MPI
# Prefixes of the variables that the launchers set in their workers' environment.
LAUNCHERS = ("BIGBATCH_WORLD_SIZE", "FLUX_", "HOROVOD_RANK", "MPI_", "OMPI_COMM_", "PALS_", "PMI", "SLURM_")
# These variables tell Horovod that there is one worker. MPI takes a second to find that out.
SINGLE_PROCESS = {CONTROLLER: "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"} | {
    f"HOROVOD_{scope}{name}": number for scope in ("", "LOCAL_", "CROSS_")
    for name, number in (("RANK", "0"), ("SIZE", "1"))}
# The number of processes according to launchers whose ranks Horovod does not know: MPICH's and Intel's mpirun, srun
# without PMIx, MVAPICH, Flux, jsrun, torchrun.
OTHERS = ("PMI_SIZE", "SLURM_STEP_NUM_TASKS", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE",
          "WORLD_SIZE")
SHELLS = {"ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "ksh93", "mksh", "sh", "tcsh", "zsh"}
WATCH = 1.0  # seconds between two looks at a worker's ancestors


def _variables(default: int, *names: str):
    return field(default=default, metadata={"names": names})


@dataclass(frozen=True)
class Launched:
    """This worker's rank and size according to its launcher; rank 0 of 1 without a launcher. local: on this node.

    Each field is read from the first of its variables that is set: Horovod's, Open MPI's, Slurm's. BIGBATCH_WORLD_SIZE
    is the number of workers that a script in launch/ was asked for.
    """

    rank: int = _variables(0, "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
    size: int = _variables(1, "BIGBATCH_WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    local_rank: int = _variables(0, "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    local_size: int = _variables(1, "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE",
                                "SLURM_STEP_TASKS_PER_NODE")


RANKS, SIZES = (field.metadata["names"] for field in fields(Launched)[:2])


def launched() -> Launched:
    """Raises UserError if a launcher has started several processes that cannot find each other."""
    is_worker = _is_worker()
    if not is_worker and (name := _several(OTHERS)):
        raise UserError(f"{name}={os.environ[name]}: Bigbatch does not know this launcher, so each process would work "
                        "alone; start them with horovodrun --gloo or mpirun from this environment, srun --mpi=pmix, or "
                        f"a script in launch/; if they are to work alone, unset {name}")
    # without a rank, Slurm's describe the job, or an interactive shell's step
    known = {name: value for name, value in os.environ.items() if is_worker or not name.startswith("SLURM_")}
    return Launched(**{field.name: int(re.match(r"\d+", known[name])[0]) for field in fields(Launched)
                       for name in reversed(field.metadata["names"]) if name in known})


def check_alone() -> None:
    """Raises UsageError if a launcher has started several processes."""
    if name := _several((*SIZES, *OTHERS)):
        raise UsageError(f"this command runs alone, and a launcher has started it several times ({name}="
                         f"{os.environ[name]}); start it without mpirun, horovodrun or srun, or unset {name}")


def _is_worker() -> bool:
    return any(name in os.environ for name in RANKS)


def _several(names) -> str | None:
    """Returns the first of these variables that is a number above 1. Only one task of `srun --pty` has a terminal."""
    return next((name for name in names if os.environ.get(name, "").isdecimal() and int(os.environ[name]) > 1
                 and not (name.startswith("SLURM_") and "SLURM_PTY_PORT" in os.environ)), None)


def nodes_differ() -> bool:
    """Whether the launcher reports nodes with different numbers of workers. mpirun does not report 1 + 2 + 3."""
    world = launched()
    nodes = int(os.environ.get(NODES, world.size // world.local_size))
    return world.local_size * nodes != world.size


def ranks_scattered() -> bool:
    """Whether this worker's node does not hold consecutive ranks that start at a multiple of their number."""
    world = launched()
    return world.rank % world.local_size != world.local_rank


def uses_gloo() -> bool:
    return os.environ.get(CONTROLLER) == "gloo"


@contextlib.contextmanager
def single_process_environment() -> Iterator[None]:
    """Tells Horovod that there is one worker, if no variable of a launcher is set."""
    no_launcher = not any(name.startswith(LAUNCHERS) for name in os.environ)
    # removed at the end, so that no child inherits them
    added = SINGLE_PROCESS.keys() - os.environ.keys() if no_launcher else ()
    os.environ.update({name: SINGLE_PROCESS[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def end_with_launcher() -> None:
    """Kills this worker when its launcher exits, or a process between them. Without a launcher, it does nothing.

    horovodrun otherwise leaves workers on other hosts running when it is stopped, or when one of them fails. Between it
    and its workers are shells, which outlive it.
    """
    if _is_worker():
        end_with_parent(signal.SIGKILL)
        start_service("watch of the launcher", _end_with, _up_to_launcher())


def _end_with(chain: list[int]) -> None:
    """Kills this process when one of these ancestors ends: the process below it then has another parent."""
    is_whole = True
    while is_whole:
        time.sleep(WATCH)
        with contextlib.suppress(OSError):  # such as too many open files
            is_whole = [*islice(_ancestors(), len(chain))] == chain
    os.kill(os.getpid(), signal.SIGKILL)


def _up_to_launcher() -> list[int]:
    """Returns the process ids of this process's ancestors up to its launcher, parent first."""
    chain = []
    for process in _ancestors():
        chain.append(process)
        if _is_launcher(process):
            break
    return chain


def _is_launcher(process: int) -> bool:
    """Whether an ancestor is neither a shell nor a program, such as `uv run`, that has this worker's variables."""
    try:
        program = os.path.basename(os.readlink(f"/proc/{process}/exe"))
        variables = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:  # another user's: Slurm's, or sshd
        return True
    return program not in SHELLS and not any(f"{name}=".encode() in variables for name in RANKS)


def _ancestors() -> Iterator[int]:
    """Yields the process ids of this process's ancestors, parent first, without process 1 of the system or container.
    """
    process = os.getppid()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
        while process > 1:
            yield process
            process = int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def end_with_parent(number: signal.Signals) -> None:
    """Sends this process the signal when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
