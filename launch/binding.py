"""Binds each worker to the cores and the memory of its GPU's socket.

    python -m launch.binding COMMAND...               runs the command, bound by the local rank from the launcher
    python -m launch.binding --print [--workers=N]    prints the binding of N workers here, and of those of DGXs
    python -m launch.binding --count                  prints the number of workers of this machine: one per GPU

A worker's memory and the copies to its GPU then cross no socket, and no two workers share a core. DALI and TensorFlow
derive their numbers of threads from the cores that a worker may use, OpenMP from OMP_NUM_THREADS.
"""
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distributed import local_ranks
from distributed.launcher import launched
from launch.machine import KNOWN, Gpu, Node, gpus_here, known_machine, machine, ranges

LOGS = "BIGBATCH_LOGS"
PER_GPU = "BIGBATCH_WORKERS_PER_GPU"


@dataclass(frozen=True)
class Binding:
    """The binding of a worker. gpu: its number, or None. nodes: NUMA nodes for memory. cores: as in Node."""

    gpu: int | None
    nodes: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        """The indices of the hardware threads."""
        return tuple(sorted(cpu for core in self.cores for cpu in core))


def gpus_of(workers: int, found: Sequence[Gpu]) -> list[Gpu | None]:
    """Returns the GPU of each worker in distributed.world, by local rank: the available GPUs in turn."""
    return [found[worker % len(found)] if found else None for worker in range(workers)]


def bindings(nodes: tuple[Node, ...], workers: Sequence[Gpu | None]) -> list[Binding]:
    """Returns the binding of each worker on a machine. workers: the GPU of each, by local rank.

    A worker with a GPU gets an equal share of the cores that belong to its GPU's node. Without GPUs, each worker gets
    an equal share of all cores. If there are more workers than cores, they share the cores.
    """
    if None in workers:
        home = dict.fromkeys(range(len(workers)), 0)
        domains = {0: list(nodes)}
    else:
        numbers = [node.number for node in nodes]
        home = {rank: gpu.node if gpu.node in numbers else numbers[0] for rank, gpu in enumerate(workers)}
        domains = _domains(nodes, set(home.values()))
    bound = []
    for rank, gpu in enumerate(workers):
        neighbours = sorted((r for r in home if home[r] == home[rank]), key=lambda r: (gpu and workers[r].number, r))
        cores = [(core, node.number) for node in domains[home[rank]] for core in node.cores]
        part = _part(cores, neighbours.index(rank), len(neighbours))
        bound.append(Binding(gpu and gpu.number, tuple(sorted({node for _, node in part})),
                             tuple(core for core, _ in part)))
    return bound


def _domains(nodes, used: set[int]) -> dict[int, list[Node]]:
    """Maps each node with GPUs in use to itself and its share of the nodes of its socket without GPUs in use."""
    domains = {node.number: [node] for node in nodes if node.number in used}
    for idle in nodes:
        near = [domain for domain in domains.values() if domain[0].socket == idle.socket]
        if idle.number not in used and near:
            min(near, key=lambda domain: (len(domain), abs(domain[0].number - idle.number))).append(idle)
    return domains


def _part(things, number, count):
    """Returns part `number` of `count` equal parts, or all things if there are fewer than `count`."""
    size = len(things)
    return things if size < count else things[number * size // count:(number + 1) * size // count]


def table(title: str, bound: Sequence[Binding]) -> str:
    """Formats a title, the heads of the columns, and a line per worker."""
    lines = [title, "worker  GPU  NUMA nodes  DALI threads  OpenMP threads  cores"]
    for rank, binding in enumerate(bound):
        gpu = "-" if binding.gpu is None else binding.gpu
        lines.append(f"{rank:>6}  {gpu:>3}  {ranges(binding.nodes):>10}  {len(binding.cpus):>12}  "
                     f"{len(binding.cores):>14}  {ranges(binding.cpus)}")
    return "\n".join(lines)


def run_bound(command: list[str]) -> None:
    """Binds this process to its cores and memory, then execs the command. Without numactl, only the cores are bound.

    If a log folder is set, the output of each rank except 0 goes to its own file there.
    """
    worker = launched()
    if LOGS in os.environ and worker.rank:
        log = os.open(Path(os.environ[LOGS]) / f"rank-{worker.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
    binding = bindings(machine(), local_gpus(worker))[worker.local_rank]
    os.environ.setdefault("OMP_NUM_THREADS", str(len(binding.cores)))
    os.sched_setaffinity(0, binding.cpus)
    try:
        command = [*memory_binding(binding.nodes), *command]
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def local_gpus(worker) -> list[Gpu | None]:
    """Returns the GPU of each worker of this node, by local rank.

    The workers exchange their GPUs, because a task of a Slurm job may see only one GPU, which is the first one for each
    task.
    """
    found = gpus_here()
    if found and worker.local_size > 1:
        mine = found[worker.local_rank % len(found)]
        everyone = local_ranks.gather([mine.number, mine.node], worker)
        if everyone:
            return [Gpu(number, node) for number, node in everyone]
    return gpus_of(worker.local_size, found)


def memory_binding(nodes: Sequence[int]) -> list[str]:
    """Returns the command prefix that binds memory; empty without numactl, or in a container without SYS_NICE."""
    words = ["numactl", f"--membind={ranges(nodes)}"]
    allowed = shutil.which("numactl") and subprocess.run([*words, "true"], capture_output=True).returncode == 0
    return words if allowed else []


def workers_here() -> int:
    return max(1, len(gpus_here())) * int(os.environ.get(PER_GPU, 1))


def main(argv) -> None:
    if argv[1:2] == ["--count"]:
        print(workers_here())
    elif argv[1:2] == ["--print"]:
        asked = [int(word.partition("=")[2]) for word in argv[2:] if word.startswith("--workers=")]
        workers = asked[0] if asked else workers_here()
        tables = [table("This machine:", bindings(machine(), gpus_of(workers, gpus_here())))]
        for title, name in KNOWN.items():
            nodes, found = known_machine(name)
            bound = bindings(nodes, gpus_of(len(found) * int(os.environ.get(PER_GPU, 1)), found))
            tables.append(table(f"A {title}:", bound))
        print("\n\n".join(tables))
    else:
        run_bound(argv[1:])


if __name__ == "__main__":
    main(sys.argv)
