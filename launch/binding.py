"""Each worker on the cores and the memory of its GPU's socket.

    python -m launch.binding COMMAND...               runs the command bound, as the local rank that a launcher has set
    python -m launch.binding --print [--workers=N]    what N workers would be bound to here, and on a DGX-1
    python -m launch.binding --count                  how many workers this machine takes: one a GPU

A worker's memory and the copies to its GPU then cross no socket, and no two workers share a core. DALI and TensorFlow
take their numbers of threads from the cores that a worker may use, OpenMP from OMP_NUM_THREADS.
"""
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from distributed.launcher import launched
from launch.facts import nvidia_smi

LOGS = "BIGBATCH_LOGS"
PER_GPU = "BIGBATCH_WORKERS_PER_GPU"
NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")
PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Node:
    """A NUMA node: a socket and its memory. cores: of each, its hardware threads' numbers; gpus: CUDA's numbers."""

    number: int
    cores: tuple[tuple[int, ...], ...]
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Share:
    """What a worker is bound to: a GPU's number or None, NUMA nodes, cores as in Node."""

    gpu: int | None
    nodes: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        """The numbers of the hardware threads."""
        return tuple(sorted(cpu for core in self.cores for cpu in core))


# Two Xeon E5-2698 v4 of 20 cores and 40 threads, GPUs 0 to 3 at the first and 4 to 7 at the second (NVIDIA DGX-1 User
# Guide; `nvidia-smi topo -m` there).
DGX1 = tuple(Node(node, tuple((core, core + 40) for core in range(20 * node, 20 * node + 20)),
                  tuple(range(4 * node, 4 * node + 4))) for node in (0, 1))


def machine() -> tuple[Node, ...]:
    """This machine's NUMA nodes, with those of their cores that this process may use."""
    allowed, gpus = os.sched_getaffinity(0), _gpu_nodes()
    nodes = []
    for path in sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        number, cpus = int(path.name[4:]), _numbers((path / "cpulist").read_text())
        cores = {_siblings(cpu) & allowed or {cpu}: None for cpu in cpus if cpu in allowed}
        if cores:
            nodes.append(Node(number, tuple(tuple(sorted(core)) for core in cores),
                              tuple(gpu for gpu, node in gpus.items() if node == number)))
    placed = {gpu for node in nodes for gpu in node.gpus}
    lost = tuple(gpu for gpu in gpus if gpu not in placed)  # at a socket that we may not use, or that does not say
    if not nodes:
        return (Node(0, tuple((cpu,) for cpu in sorted(allowed)), lost),)
    return (Node(nodes[0].number, nodes[0].cores, nodes[0].gpus + lost), *nodes[1:])


def shares(nodes: tuple[Node, ...], workers: int) -> list[Share]:
    """What each of so many workers on a machine is bound to, by local rank.

    With GPUs, worker w has the one that train.py takes, w modulo their number, and an equal share of its node's cores;
    without, an equal share of all cores. Where there are more workers than cores, they share them.
    """
    gpus = {gpu: node for node in nodes for gpu in node.gpus}
    if not gpus:
        cores = [(core, node.number) for node in nodes for core in node.cores]
        parts = [_part(cores, worker, workers) for worker in range(workers)]
        return [Share(None, tuple(sorted({node for _, node in part})), tuple(core for core, _ in part))
                for part in parts]
    numbers = sorted(gpus)
    chosen = [numbers[worker % len(numbers)] for worker in range(workers)]
    bound = []
    for worker, gpu in enumerate(chosen):
        node = gpus[gpu]
        neighbours = sorted((g, w) for w, g in enumerate(chosen) if gpus[g] is node)
        part = _part(node.cores, neighbours.index((gpu, worker)), len(neighbours))
        bound.append(Share(gpu, (node.number,), tuple(part)))
    return bound


def _part(things, number, count):
    """The number-th of count equal parts, or all of them where there are too few."""
    size = len(things)
    return things if size < count else things[number * size // count:(number + 1) * size // count]


def table(title: str, nodes: tuple[Node, ...], workers: int) -> str:
    lines = [title, f"{'worker':>6}  {'GPU':>3}  {'socket and memory':>17}  {'DALI threads':>12}  "
                    f"{'OpenMP threads':>14}  cores"]
    for rank, share in enumerate(shares(nodes, workers)):
        gpu = "-" if share.gpu is None else share.gpu
        lines.append(f"{rank:>6}  {gpu:>3}  {ranges(share.nodes):>17}  {len(share.cpus):>12}  "
                     f"{len(share.cores):>14}  {ranges(share.cpus)}")
    return "\n".join(lines)


def ranges(numbers) -> str:
    """0-4,40-44 for the numbers that lie in these ranges, as Linux and numactl write them."""
    parts = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def run_bound(command: list[str]) -> None:
    """Becomes the command, bound. Without numactl memory still comes from the socket that first touches it.

    Where a folder for logs is set, what a worker other than rank 0 writes goes to a file of its own there.
    """
    worker = launched()
    share = shares(machine(), worker.local_size)[worker.local_rank]
    if LOGS in os.environ and worker.rank:
        log = os.open(Path(os.environ[LOGS]) / f"rank-{worker.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
    os.environ.setdefault("OMP_NUM_THREADS", str(len(share.cores)))
    os.sched_setaffinity(0, share.cpus)
    if shutil.which("numactl"):
        command = ["numactl", f"--membind={ranges(share.nodes)}", *command]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def workers_here() -> int:
    return max(1, sum(len(node.gpus) for node in machine())) * int(os.environ.get(PER_GPU, 1))


def _gpu_nodes() -> dict[int, int]:
    """GPU -> NUMA node, -1 where the machine does not say."""
    found = {}
    for gpu, address in enumerate(nvidia_smi("pci.bus_id")):
        domain, _, rest = address.strip().lower().partition(":")  # sysfs writes the domain in four digits
        path = PCI / f"{domain[-4:]}:{rest}" / "numa_node"
        found[gpu] = int(path.read_text()) if path.is_file() else -1
    return found


def _siblings(cpu: int) -> frozenset[int]:
    path = CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return frozenset(_numbers(path.read_text()) if path.is_file() else (cpu,))


def _numbers(text: str) -> list[int]:
    """The numbers that Linux writes as 0-4,40-44."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return [number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)]


def main(argv) -> None:
    if argv[1:2] == ["--count"]:
        print(workers_here())
    elif argv[1:2] == ["--print"]:
        asked = [int(word.partition("=")[2]) for word in argv[2:] if word.startswith("--workers=")]
        here, workers = machine(), asked[0] if asked else workers_here()
        print(table("This machine:", here, workers))
        if here != DGX1:
            print()
            print(table("A DGX-1 with V100:", DGX1, 8 * int(os.environ.get(PER_GPU, 1))))
    else:
        run_bound(argv[1:])


if __name__ == "__main__":
    main(sys.argv)
