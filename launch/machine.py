"""NUMA nodes, cores and GPUs of this machine and of the machines in launch/topologies."""
import json
import os
from dataclasses import dataclass
from pathlib import Path

from distributed import gpus

TOPOLOGIES = Path(__file__).parent / "topologies"
NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")
PCI = Path("/sys/bus/pci/devices")
KNOWN = {"DGX-1 with V100": "dgx1", "DGX A100": "dgx_a100", "DGX H100": "dgx_h100"}  # title -> file in topologies/


@dataclass(frozen=True)
class Node:
    """A NUMA node, not a host. cores: the indices of each core's hardware threads. socket: index of its socket."""

    number: int
    cores: tuple[tuple[int, ...], ...]
    socket: int = 0


@dataclass(frozen=True)
class Gpu:
    """A GPU. number: nvidia-smi's index. node: its NUMA node, -1 if unknown."""

    number: int
    node: int


def machine() -> tuple[Node, ...]:
    """Returns this machine's NUMA nodes, with the cores that this process may use."""
    allowed = os.sched_getaffinity(0)
    nodes = []
    for path in sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cpus = [cpu for cpu in _numbers((path / "cpulist").read_text()) if cpu in allowed]
        cores = {_siblings(cpu) & allowed or {cpu}: None for cpu in cpus}
        if cores:
            nodes.append(Node(int(path.name[4:]), tuple(tuple(sorted(core)) for core in cores), _socket(cpus[0])))
    return tuple(nodes) or (Node(0, tuple((cpu,) for cpu in sorted(allowed))),)


def known_machine(name: str) -> tuple[tuple[Node, ...], list[Gpu]]:
    """Returns the NUMA nodes and the GPUs of a machine in launch/topologies. The file names its sources."""
    described = json.loads((TOPOLOGIES / f"{name}.json").read_text())["numa"]
    nodes = tuple(Node(one["node"], tuple(zip(_numbers(one["cores"]), _numbers(one["siblings"]), strict=True)),
                       one["socket"]) for one in described)
    return nodes, sorted((Gpu(number, one["node"]) for one in described for number in one["gpus"]),
                         key=lambda gpu: gpu.number)


def gpus_here() -> list[Gpu]:
    """Returns the GPUs that this process may use, in the order of distributed.gpus.visible."""
    return [_with_numa_node(gpu) for gpu in gpus.visible()]


def ranges(numbers) -> str:
    """Formats numbers as ranges such as 0-4,40-44, as Linux and numactl do."""
    parts = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _with_numa_node(gpu: gpus.Gpu) -> Gpu:
    domain, _, rest = gpu.address.lower().partition(":")  # sysfs writes the domain in four digits
    path = PCI / f"{domain[-4:]}:{rest}" / "numa_node"
    return Gpu(gpu.number, int(path.read_text()) if path.is_file() else -1)


def _socket(cpu: int) -> int:
    path = CPUS / f"cpu{cpu}" / "topology" / "physical_package_id"
    return int(path.read_text()) if path.is_file() else 0


def _siblings(cpu: int) -> frozenset[int]:
    path = CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return frozenset(_numbers(path.read_text()) if path.is_file() else (cpu,))


def _numbers(text: str) -> list[int]:
    """Parses ranges in Linux's format, such as 0-4,40-44."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return [number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)]
