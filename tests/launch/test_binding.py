import os
import subprocess
import sys

import pytest
from conftest import ROOT

from launch.binding import DGX1, Node, machine, ranges, shares


def test_a_dgx1_gives_each_of_eight_workers_its_gpu_and_five_cores_of_its_socket():
    # By hand: 20 cores a socket, 4 GPUs each; core c's second thread is c + 40.
    bound = shares(DGX1, 8)
    assert [share.gpu for share in bound] == list(range(8))
    assert [share.nodes for share in bound] == [(0,)] * 4 + [(1,)] * 4
    assert ranges(bound[0].cpus) == "0-4,40-44" and ranges(bound[5].cpus) == "25-29,65-69"
    assert sorted(cpu for share in bound for cpu in share.cpus) == list(range(80))


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 12, 16, 24, 40])
def test_workers_share_no_core_and_leave_no_socket(workers):
    bound = shares(DGX1, workers)
    cpus = [cpu for share in bound for cpu in share.cpus]
    assert len(set(cpus)) == len(cpus)
    for rank, share in enumerate(bound):
        assert share.gpu == rank % 8  # the GPU that train.py takes
        [node] = [node for node in DGX1 if share.gpu in node.gpus]
        assert share.nodes == (node.number,) and set(share.cores) <= set(node.cores)
    sizes = {len(share.cores) for share in bound if share.nodes == (0,)}
    assert max(sizes) - min(sizes) <= 1


def test_without_gpus_all_cores_are_shared_out():
    nodes = (Node(0, ((0, 4), (1, 5))), Node(1, ((2, 6), (3, 7))))
    assert [share.cpus for share in shares(nodes, 2)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [share.nodes for share in shares(nodes, 1)] == [(0, 1)]
    assert all(share.cores == nodes[0].cores + nodes[1].cores for share in shares(nodes, 5))  # more than cores


def test_this_machine_is_what_linux_says():
    cpus = sorted(cpu for node in machine() for core in node.cores for cpu in core)
    assert cpus == sorted(os.sched_getaffinity(0))


def test_a_command_runs_bound_with_its_number_of_threads():
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.fail("the tests need two cores")
    seen = []
    for rank in (0, 1):
        done = subprocess.run(
            [sys.executable, "-m", "launch.binding", sys.executable, "-c",
             "import os; print(*sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"],
            cwd=ROOT, text=True, capture_output=True, timeout=60,
            env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
        *own, threads = map(int, done.stdout.split())
        seen.append(own)
        assert 1 <= threads <= len(own)
    assert sorted(seen[0] + seen[1]) == cores


def test_a_gpu_stands_at_the_socket_that_its_bus_address_says(tmp_path, monkeypatch):
    from launch import binding

    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '00000000:06:00.0\\n00000000:85:00.0\\n'\n")
    program.chmod(0o755)
    for address, node in (("0000:06:00.0", 1), ("0000:85:00.0", 0)):
        (tmp_path / "pci" / address).mkdir(parents=True)
        (tmp_path / "pci" / address / "numa_node").write_text(f"{node}\n")
    for node, cpus in ((0, "0"), (1, "1")):
        (tmp_path / "nodes" / f"node{node}").mkdir(parents=True)
        (tmp_path / "nodes" / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(binding, "PCI", tmp_path / "pci")
    monkeypatch.setattr(binding, "NODES", tmp_path / "nodes")
    monkeypatch.setattr(binding, "CPUS", tmp_path / "none")
    assert machine() == (Node(0, ((0,),), (1,)), Node(1, ((1,),), (0,)))
    assert [(share.gpu, share.cpus) for share in shares(machine(), 2)] == [(0, (1,)), (1, (0,))]
