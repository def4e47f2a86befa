"""Binds each worker to the cores and the memory of its GPU's NUMA node.

    python -m launch.binding COMMAND...               runs the command, bound by the local rank from the launcher
    python -m launch.binding --print [--workers=N]    prints the binding of N workers here, and of those of DGXs
    python -m launch.binding --count                  prints the number of workers of this machine: one per GPU

A worker's memory accesses and its copies to the GPU then stay within one socket, and no two workers share a core. DALI
and TensorFlow start one thread per core that the worker may use. OpenMP starts OMP_NUM_THREADS threads.
"""
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from common import command
from common.cores import cores_of_quota
from common.errors import UsageError, UserError
from common.flags import define, described, flag, parsed, read, split
from common.launcher import Launched, launched
from distributed import gpus

LOGS = "BIGBATCH_LOGS"
PER_GPU = "BIGBATCH_WORKERS_PER_GPU"
TOPOLOGIES = Path(__file__).parent / "topologies"
KNOWN = {"DGX-1 with V100": "dgx1", "DGX A100": "dgx_a100", "DGX H100": "dgx_h100"}  # title -> file in topologies/


class Core(NamedTuple):
    """A processor core. node: its NUMA node. threads: Linux's numbers of its hardware threads."""

    socket: int
    node: int
    threads: tuple[int, ...]


@dataclass(frozen=True)
class Options:
    """This program's own flags. Without one, it runs a command."""

    print: bool = flag(False, "Print the binding of each worker here, and of those of DGXs.")
    workers: int | None = flag(None, "Number of workers whose binding is printed. Default: one per GPU here.", low=1)
    count: bool = flag(False, "Print the number of workers of this machine: one per GPU.")


def shares(cores: Sequence[Core], nodes: Sequence[int | None]) -> list[list[Core]]:
    """Returns the cores of each worker. nodes: the NUMA node of each worker's GPU, by local rank; None without a GPU.

    Workers whose GPUs are at the same node get equal shares of its cores. The cores of a node without a GPU in use go
    to the workers at another node of its socket. A GPU whose node has no cores, or is unknown (-1), counts as at the
    first node. Without GPUs, all cores are split equally. Workers share cores only where there are too few.
    """
    sockets = {core.node: core.socket for core in cores}
    homes = [node if node in sockets else cores[0].node for node in nodes]
    joined = {home: home for home in homes}
    for node, socket in sockets.items():
        near = [home for home in sorted(set(homes)) if None in nodes or sockets[home] == socket]
        if near and node not in joined:
            joined[node] = min(near, key=lambda home: ([*joined.values()].count(home), abs(home - node)))
    assigned = []
    for rank, home in enumerate(homes):
        local = sorted((core for core in cores if joined.get(core.node) == home), key=lambda core: core.node != home)
        index = homes[:rank].count(home)
        count = homes.count(home)
        assigned.append(local if count > len(local) else
                        local[index * len(local) // count:(index + 1) * len(local) // count])
    return assigned


def nodes_of(share: Sequence[Core]) -> list[int]:
    return sorted({core.node for core in share})


def threads_of(share: Sequence[Core]) -> list[int]:
    return sorted(thread for core in share for thread in core.threads)


def cores_here() -> list[Core]:
    """Returns the cores that this process may use, sorted by NUMA node."""
    listed = subprocess.run(["lscpu", "--parse=NODE,SOCKET,CORE,CPU"], text=True, capture_output=True, check=True)
    allowed = os.sched_getaffinity(0)
    threads_of_core = defaultdict(list)
    for line in listed.stdout.splitlines():
        if not line.startswith("#"):
            *core, thread = (int(word or 0) for word in line.split(","))  # a kernel without NUMA names no node
            if thread in allowed:
                threads_of_core[*core].append(thread)
    return [Core(socket, node, tuple(threads)) for (node, socket, _), threads in sorted(threads_of_core.items())]


def share_here(worker: Launched) -> list[Core]:
    """Returns this worker's cores.

    A task of a Slurm job may see only its own GPU. If the machine has one GPU per worker, the index of this GPU among
    all of them decides on the share, so that the workers, which do not see each other's GPUs, get different cores.
    """
    devices = [*gpus_here().values()]
    index = worker.local_rank
    installed = gpus.on_pci()
    if len(devices) == 1 and devices[0] in installed and len(installed) == worker.local_size:
        index = installed.index(devices[0])
        devices = installed
    return shares(cores_here(), in_turn(worker.local_size, [*map(numa_node, devices)]))[index]


def gpus_here() -> dict[int, Path]:
    """Returns the GPUs that this process may use, in CUDA's order: nvidia-smi's number -> the folder of the PCI device.
    """
    return {gpu.number: gpus.PCI / gpu.address for gpu in gpus.visible()}


def numa_node(device: Path) -> int:
    """Returns a PCI device's NUMA node, -1 if unknown."""
    return int((device / "numa_node").read_text()) if (device / "numa_node").is_file() else -1


def in_turn(workers: int, available: Sequence) -> list:
    """Returns the GPU of each worker by local rank: round-robin, as in distributed.world. None if there are no GPUs."""
    return [available[worker % len(available)] if available else None for worker in range(workers)]


def known_machine(name: str) -> tuple[list[Core], dict[int, int]]:
    """Returns cores, and GPUs with their NUMA nodes, of a machine in launch/topologies. The file names its sources."""
    nodes = json.loads((TOPOLOGIES / f"{name}.json").read_text())["numa"]
    cores = [Core(node["socket"], node["node"], threads) for node in nodes
             for threads in zip(_numbers(node["cores"]), _numbers(node["siblings"]), strict=True)]
    return cores, dict(sorted((number, node["node"]) for node in nodes for number in node["gpus"]))


def _numbers(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last) + 1)


def ranges(numbers: Iterable[int]) -> str:
    """Formats numbers as ranges such as 0-4,40-44, as Linux and numactl do."""
    runs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    parts = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def table(title: str, workers: int, cores: Sequence[Core], node_of_gpu: dict[int, int], quota: int = 1 << 20) -> str:
    """Returns a table with a line per worker.

    quota: number of cores whose time the container grants each worker (common.cores), which limits its threads.
    """
    lines = [title, "worker  GPU  NUMA nodes  DALI threads  OpenMP threads  cores"]
    numbers = in_turn(workers, [*node_of_gpu])
    for rank, (gpu, share) in enumerate(zip(numbers, shares(cores, [*map(node_of_gpu.get, numbers)]), strict=True)):
        dali, openmp = (min(quota, len(found)) for found in (threads_of(share), share))
        lines.append(f"{rank:>6}  {'-' if gpu is None else gpu:>3}  {ranges(nodes_of(share)):>10}  {dali:>12}  "
                     f"{openmp:>14}  {ranges(threads_of(share))}")
    return "\n".join(lines)


def run_bound(command: list[str]) -> None:
    """Binds this process to its cores and memory, then replaces it by the command.

    Without numactl, only the cores are bound. If $BIGBATCH_LOGS is a folder, the output of each rank except 0 goes to a
    file there.
    """
    try:
        worker = launched()
    except UserError as error:
        sys.exit(str(error))
    if LOGS in os.environ and worker.rank:
        log = os.open(Path(os.environ[LOGS]) / f"rank-{worker.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
    share = share_here(worker)
    os.environ.setdefault("OMP_NUM_THREADS", str(min(len(share), cores_of_quota(worker.local_size))))
    os.sched_setaffinity(0, threads_of(share))
    try:
        command = [*memory_binding(nodes_of(share)), *command]
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def memory_binding(nodes: Sequence[int]) -> list[str]:
    """Returns the command prefix that binds memory; empty without numactl, or in a container without SYS_NICE."""
    words = ["numactl", f"--membind={ranges(nodes)}"]
    allowed = shutil.which("numactl") and subprocess.run([*words, "true"], capture_output=True).returncode == 0
    return words if allowed else []


def workers_here() -> int:
    return max(1, len(gpus.visible())) * workers_per_gpu()


def workers_per_gpu() -> int:
    """Returns $BIGBATCH_WORKERS_PER_GPU, or 1. Raises UsageError."""
    text = os.environ.get(PER_GPU) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"${PER_GPU} is '{text}'; set it to the number of workers that share a GPU, or unset it")
    return int(text)


def print_binding(workers: int) -> None:
    """Prints the binding of these workers here, and of those of DGXs."""
    here = {number: numa_node(device) for number, device in gpus_here().items()}
    tables = [table("This machine:", workers, cores_here(), here, cores_of_quota(workers))]
    for title, name in KNOWN.items():
        cores, node_of_gpu = known_machine(name)
        tables.append(table(f"A {title}:", len(node_of_gpu) * workers_per_gpu(), cores, node_of_gpu))
    print("\n\n".join(tables))


@command.program("launch.binding", __doc__, lambda _: described(define(Options)))
def show(argv) -> None:
    """Prints what the flags of a command line ask for. Raises UsageError."""
    options = parsed(read(define(Options), argv), Options)
    if options.count == options.print:
        raise UsageError("give COMMAND, --print or --count; see --help")
    print(workers_here()) if options.count else print_binding(options.workers or workers_here())


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    own, words = split(define(Options), argv)
    return show(argv) if own[1:] or not words else run_bound(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
