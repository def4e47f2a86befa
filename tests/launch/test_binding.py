import os
import random
import subprocess
import sys

import pytest
from conftest import ROOT

from common.launcher import Launched
from distributed import gpus
from launch import binding
from launch.binding import Core, in_turn, known_machine, nodes_of, ranges, shares, threads_of
from tests.rigs.gpus import gpu, pretend

DGX1, V100S = known_machine("dgx1")
ON_DGX1 = [*V100S.values()]  # the node of each GPU


def test_a_dgx1_gives_each_of_eight_workers_its_gpu_and_five_cores_of_its_socket():
    # By hand: 20 cores a socket, 4 GPUs each; core c's second thread is c + 40.
    assert [*V100S] == list(range(8))
    found = shares(DGX1, ON_DGX1)
    assert [nodes_of(share) for share in found] == [[0]] * 4 + [[1]] * 4
    assert ranges(threads_of(found[0])) == "0-4,40-44" and ranges(threads_of(found[5])) == "25-29,65-69"
    assert sorted(thread for share in found for thread in threads_of(share)) == list(range(80))


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 12, 16, 24, 40])
def test_workers_share_no_core_and_leave_no_socket(workers):
    found = shares(DGX1, in_turn(workers, ON_DGX1))
    threads = [thread for share in found for thread in threads_of(share)]
    assert len(set(threads)) == len(threads)
    for rank, share in enumerate(found):
        assert {core.node for core in share} == {rank % 8 // 4}  # that of the GPU that train.py takes
    sizes = {len(share) for share in found if nodes_of(share) == [0]}
    assert max(sizes) - min(sizes) <= 1


def test_without_gpus_all_cores_are_split():
    cores = [Core(0, 0, (0, 4)), Core(0, 0, (1, 5)), Core(1, 1, (2, 6)), Core(1, 1, (3, 7))]
    assert [threads_of(share) for share in shares(cores, [None] * 2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [nodes_of(share) for share in shares(cores, [None])] == [[0, 1]]
    assert shares(cores, [None] * 5) == [cores] * 5  # more than cores


@pytest.mark.parametrize("name, size", [("dgx1", 5), ("dgx_a100", 16), ("dgx_h100", 14)])
def test_a_dgx_leaves_no_core_idle(name, size):
    """By hand: 40, 128 and 112 cores for eight workers."""
    cores, nodes = known_machine(name)
    found = shares(cores, in_turn(8, [*nodes.values()]))
    assert [*nodes] == list(range(8)) and {len(share) for share in found} == {size}
    assert sorted(core for share in found for core in share) == sorted(cores)
    sockets = {core.node: core.socket for core in cores}
    assert [{core.socket for core in share} for share in found] == [{sockets[node]} for node in nodes.values()]


def test_of_a_dgx_a100s_gpus_those_in_use_share_its_cores():
    cores, nodes = known_machine("dgx_a100")
    [share] = shares(cores, [nodes[4]])  # node 7, of the second socket
    assert len(share) == 64 and nodes_of(share) == [4, 5, 6, 7]


def test_a_gpu_at_a_node_without_cores_of_ours_takes_those_there_are():
    assert shares([Core(1, 1, (4,)), Core(1, 1, (5,))], [0, -1]) == [[Core(1, 1, (4,))], [Core(1, 1, (5,))]]


def test_a_quota_limits_the_threads_and_not_the_cores():
    _, _, line, _ = binding.table("A DGX-1:", 2, DGX1, V100S, quota=3).splitlines()
    assert line.split() == ["0", "0", "0", "3", "3", "0-9,40-49"]


def test_this_machine_is_what_linux_says():
    assert threads_of(binding.cores_here()) == sorted(os.sched_getaffinity(0))


def bound_command(rank: int, environment=(), workers: int = 2) -> list[int]:
    """The hardware threads of a command that launch.binding runs as this local rank, then its number of threads."""
    done = subprocess.run(
        [sys.executable, "-m", "launch.binding", sys.executable, "-c",
         "import os; print(*sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"],
        cwd=ROOT, text=True, capture_output=True, timeout=300,
        env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(workers), **dict(environment)})
    assert done.returncode == 0, done.stderr
    return [*map(int, done.stdout.split())]


def threads_of_two() -> list[int]:
    """Those of two workers here: each once, unless both share the only core."""
    return sorted([*os.sched_getaffinity(0)] * (1 if len(binding.cores_here()) > 1 else 2))


def test_a_command_runs_bound_with_its_number_of_threads():
    seen = []
    for rank in (0, 1):
        *own, threads = bound_command(rank)
        seen.append(own)
        assert 1 <= threads <= len(own)
    assert sorted(seen[0] + seen[1]) == threads_of_two()


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
    """Slurm's cgroups show a task its GPU alone. The machine has no GPU for each worker that it could find instead."""
    environment = pretend(tmp_path, [gpu(0), gpu(1)], one_each)
    bound = [bound_command(rank, environment)[:-1] for rank in (0, 1)]
    assert sorted(bound[0] + bound[1]) == threads_of_two()


@pytest.fixture
def computer(tmp_path, monkeypatch):
    """A function that pretends a machine: its threads' nodes, its PCI devices' nodes and classes, and its GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "PCI", tmp_path / "pci")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1000))

    def make(threads: list[str], devices: dict[str, tuple[int, str]], found: list[dict]):
        for address, (node, kind) in devices.items():
            (tmp_path / "pci" / address).mkdir(parents=True, exist_ok=True)
            for name, content in (("numa_node", node), ("class", kind), ("vendor", "0x10de")):
                (tmp_path / "pci" / address / name).write_text(f"{content}\n")
        lscpu = tmp_path / "lscpu"
        lscpu.write_text("\n".join(["#!/bin/sh", "cat <<END", "# Node,Socket,Core,CPU", *threads, "END"]))
        lscpu.chmod(0o755)
        monkeypatch.setenv("PATH", pretend(tmp_path, found)["PATH"])
        gpus._nvidia_smi.cache_clear()

    yield make
    gpus._nvidia_smi.cache_clear()


def test_eight_tasks_of_one_gpu_each_have_the_cores_of_a_dgx1(computer):
    """Each sees its GPU only, as number 0, and may get any of them, whatever its rank."""
    addresses = [f"0000:{number + 6:02x}:00.0" for number in range(8)]
    devices = {address: (node, "0x030200") for address, node in zip(addresses, ON_DGX1, strict=True)}
    devices["0000:06:00.1"], devices["0000:05:00.0"] = (0, "0x040300"), (0, "0x068000")  # sound, and an NVSwitch
    threads = [f"{node},{node},{core % 20},{core + 40 * second}" for second in (0, 1) for core in range(40)
               for node in [core // 20]]
    order = random.sample(range(8), 8)
    for rank, number in enumerate(order):
        computer(threads, devices, [gpu(0, pci__bus_id=f"0000{addresses[number].upper()}")])
        assert binding.share_here(Launched(rank, 8, rank, 8)) == shares(DGX1, ON_DGX1)[number], order


@pytest.mark.parametrize("visible, numbers", [(None, [0, 1]), ("1", [1]), ("GPU-00000001,GPU-00000000", [1, 0])])
def test_a_gpu_stands_at_the_node_that_its_bus_address_says(computer, monkeypatch, visible, numbers):
    computer(["0,,0,0", "1,,1,1"], {"0000:06:00.0": (1, "0x030000"), "0000:07:00.0": (0, "0x030000")},
             [gpu(0), gpu(1)])
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert binding.cores_here() == [Core(0, 0, (0,)), Core(0, 1, (1,))]
    found = {number: binding.numa_node(device) for number, device in binding.gpus_here().items()}
    assert [*found.items()] == [(number, 1 - number) for number in numbers]
    for rank, number in enumerate(numbers):
        share = binding.share_here(Launched(rank, len(numbers), rank, len(numbers)))
        assert threads_of(share) == ([0, 1] if len(numbers) == 1 else [1 - number])


def test_as_many_workers_as_gpus_that_cuda_may_use(tmp_path):
    for visible, count in (("0,1", "2"), ("GPU-00000005", "1"), ("", "1")):
        done = subprocess.run([sys.executable, "-m", "launch.binding", "--count"], cwd=ROOT, text=True,
                              capture_output=True, timeout=300, env=os.environ | {"CUDA_VISIBLE_DEVICES": visible}
                              | pretend(tmp_path, [gpu(number) for number in range(8)]))
        assert done.stdout.strip() == count


@pytest.mark.parametrize(("words", "per_gpu", "message"), [
    (["--prnt"], "1", "did you mean --print?"), (["--print", "--worker=2"], "1", "did you mean --workers?"),
    (["--print", "--workers=two"], "1", "--workers=two"), (["--print", "python"], "1", "'python' is not a flag"),
    ([], "1", "give COMMAND"), (["--count"], "many", "$BIGBATCH_WORKERS_PER_GPU is 'many'"),
    (["--print"], "0", "$BIGBATCH_WORKERS_PER_GPU is '0'")])
def test_wrong_words_are_one_line(monkeypatch, capsys, words, per_gpu, message):
    monkeypatch.setenv(binding.PER_GPU, per_gpu)
    assert binding.main(["launch.binding", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("launch.binding: ") and err.count("\n") == 1 and message in err
