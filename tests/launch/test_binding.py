import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT

from launch.binding import bindings, gpus_of
from launch.machine import Gpu, Node, known_machine, machine, ranges
from tests.rigs.gpus import gpu, pretend

DGX1, V100S = known_machine("dgx1")


def test_a_dgx1_gives_each_of_eight_workers_its_gpu_and_five_cores_of_its_socket():
    # By hand: 20 cores a socket, 4 GPUs each; core c's second thread is c + 40.
    bound = bindings(DGX1, V100S)
    assert [binding.gpu for binding in bound] == list(range(8))
    assert [binding.nodes for binding in bound] == [(0,)] * 4 + [(1,)] * 4
    assert ranges(bound[0].cpus) == "0-4,40-44" and ranges(bound[5].cpus) == "25-29,65-69"
    assert sorted(cpu for binding in bound for cpu in binding.cpus) == list(range(80))


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 12, 16, 24, 40])
def test_workers_share_no_core_and_leave_no_socket(workers):
    bound = bindings(DGX1, gpus_of(workers, V100S))
    cpus = [cpu for binding in bound for cpu in binding.cpus]
    assert len(set(cpus)) == len(cpus)
    for rank, binding in enumerate(bound):
        assert binding.gpu == rank % 8  # the GPU that train.py takes
        node = DGX1[binding.gpu // 4]
        assert binding.nodes == (node.number,) and set(binding.cores) <= set(node.cores)
    sizes = {len(binding.cores) for binding in bound if binding.nodes == (0,)}
    assert max(sizes) - min(sizes) <= 1


def test_without_gpus_all_cores_are_split():
    nodes = (Node(0, ((0, 4), (1, 5))), Node(1, ((2, 6), (3, 7))))
    assert [binding.cpus for binding in bindings(nodes, [None] * 2)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [binding.nodes for binding in bindings(nodes, [None])] == [(0, 1)]
    more_than_cores = bindings(nodes, [None] * 5)
    assert all(binding.cores == nodes[0].cores + nodes[1].cores for binding in more_than_cores)


@pytest.mark.parametrize("name, sizes", [("dgx1", 5), ("dgx_a100", 16), ("dgx_h100", 14)])
def test_a_dgx_leaves_no_core_idle(name, sizes):
    """By hand: 40, 128 and 112 cores for eight workers."""
    nodes, gpus = known_machine(name)
    bound = bindings(nodes, gpus)
    assert [binding.gpu for binding in bound] == list(range(8)) and {len(binding.cores) for binding in bound} == {sizes}
    cores = [core for binding in bound for core in binding.cores]
    assert sorted(cores) == sorted(core for node in nodes for core in node.cores)
    sockets = {node.number: node.socket for node in nodes}
    homes = {gpu.number: sockets[gpu.node] for gpu in gpus}
    assert all({sockets[node] for node in binding.nodes} == {homes[binding.gpu]} for binding in bound)


def test_of_a_dgx_a100s_gpus_those_in_use_share_its_cores():
    nodes, gpus = known_machine("dgx_a100")
    one = bindings(nodes, [gpus[4]])  # at node 7, of the second socket
    assert len(one[0].cores) == 64 and set(one[0].nodes) == {4, 5, 6, 7}


def test_a_gpu_at_a_node_without_cores_of_ours_takes_those_there_are():
    nodes = (Node(1, ((4,), (5,)), 1),)
    assert [binding.cpus for binding in bindings(nodes, [Gpu(0, 0), Gpu(1, -1)])] == [(4,), (5,)]


def test_this_machine_is_what_linux_says():
    cpus = sorted(cpu for node in machine() for core in node.cores for cpu in core)
    assert cpus == sorted(os.sched_getaffinity(0))


def bound_command(rank: int, environment=(), workers: int = 2) -> list[int]:
    """The hardware threads of a command that launch.binding runs as this local rank, then its number of threads."""
    done = subprocess.run(
        [sys.executable, "-m", "launch.binding", sys.executable, "-c",
         "import os; print(*sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"],
        cwd=ROOT, text=True, capture_output=True, timeout=60,
        env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(workers), **dict(environment)})
    assert done.returncode == 0, done.stderr
    return [*map(int, done.stdout.split())]


def test_a_command_runs_bound_with_its_number_of_threads():
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.fail("the tests need two cores")
    seen = []
    for rank in (0, 1):
        *own, threads = bound_command(rank)
        seen.append(own)
        assert 1 <= threads <= len(own)
    assert sorted(seen[0] + seen[1]) == cores


@pytest.mark.parametrize("code", [0, 1])
def test_memory_is_bound_where_that_is_allowed(tmp_path, code):
    """A numactl that fails, as in a container without SYS_NICE, must not take the worker down."""
    program = tmp_path / "numactl"
    program.write_text(f'#!/bin/sh\necho "$1" >>{tmp_path}/asked\nshift\n[ {code} = 0 ] && exec "$@"\nexit 1\n')
    program.chmod(0o755)
    assert bound_command(0, {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (tmp_path / "asked").read_text().splitlines() == ["--membind=0"] * (1 if code else 2)


@pytest.mark.parametrize("one_each", [False, True])
def test_workers_that_see_one_gpu_each_share_its_node_with_those_that_are_there(tmp_path, one_each):
    """Slurm's cgroups show a task its GPU alone. Each would take half of the cores of its node, for two workers."""
    environment = pretend(tmp_path, [gpu(0), gpu(1)], one_each) | {"PMIX_NAMESPACE": f"test-{os.getpid()}"}
    with ThreadPoolExecutor(2) as pool:
        bound = list(pool.map(lambda rank: bound_command(rank, environment)[:-1], (0, 1)))
    assert not set(bound[0]) & set(bound[1]) and sorted(bound[0] + bound[1]) == sorted(os.sched_getaffinity(0))


def test_eight_tasks_of_one_gpu_each_have_the_cores_of_a_dgx1():
    gathered = [[0, 0]] * 4 + [[0, 1]] * 4  # each says: GPU number 0, which is at node 0 or 1
    bound = bindings(DGX1, [Gpu(*one) for one in gathered])
    assert [ranges(binding.cpus) for binding in bound] == [ranges(binding.cpus) for binding in bindings(DGX1, V100S)]


@pytest.mark.parametrize("visible, numbers", [(None, [0, 1]), ("1", [1]), ("GPU-00000001,GPU-00000000", [1, 0])])
def test_a_gpu_stands_at_the_node_that_its_bus_address_says(tmp_path, monkeypatch, visible, numbers):
    from distributed import gpus
    from launch import machine as machines

    addresses = ("0000:06:00.0", "0000:07:00.0")
    for address, node in zip(addresses, (1, 0), strict=True):
        (tmp_path / "pci" / address).mkdir(parents=True)
        (tmp_path / "pci" / address / "numa_node").write_text(f"{node}\n")
    for node, cpus in ((0, "0"), (1, "1")):
        (tmp_path / "nodes" / f"node{node}").mkdir(parents=True)
        (tmp_path / "nodes" / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setenv("PATH", pretend(tmp_path, [gpu(0), gpu(1)])["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machines, "PCI", tmp_path / "pci")
    monkeypatch.setattr(machines, "NODES", tmp_path / "nodes")
    monkeypatch.setattr(machines, "CPUS", tmp_path / "none")
    gpus._nvidia_smi.cache_clear()
    found = machines.gpus_here()
    assert machine() == (Node(0, ((0,),)), Node(1, ((1,),)))
    assert found == [Gpu(number, 1 - number) for number in numbers]
    assert [(binding.gpu, binding.cpus) for binding in bindings(machine(), gpus_of(len(found), found))] == [
        (number, (0, 1) if len(numbers) == 1 else (1 - number,)) for number in numbers]


def test_as_many_workers_as_gpus_that_cuda_may_use(tmp_path):
    for visible, count in (("0,1", "2"), ("GPU-00000005", "1"), ("", "1")):
        done = subprocess.run([sys.executable, "-m", "launch.binding", "--count"], cwd=ROOT, text=True,
                              capture_output=True, timeout=60, env=os.environ | {"CUDA_VISIBLE_DEVICES": visible}
                              | pretend(tmp_path, [gpu(number) for number in range(8)]))
        assert done.stdout.strip() == count
