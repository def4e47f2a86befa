"""Which GPUs a worker takes, and that none stays idle without a word."""
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import DIGITS, ROOT, TINY, run

from common.errors import UserError
from distributed import gpus, world
from distributed.world import World
from tests.rigs.gpus import gpu, pretend

QUICK = (DIGITS, *TINY, "--epochs=1")
ALL, FAILS = [gpu(number) for number in range(8)], ["No devices were found"]


@pytest.fixture
def four(tmp_path, monkeypatch):
    """A machine with four GPUs."""
    monkeypatch.setenv("PATH", pretend(tmp_path, [gpu(number) for number in range(4)])["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus._nvidia_smi.cache_clear()
    yield
    gpus._nvidia_smi.cache_clear()


@pytest.mark.parametrize("given, numbers", [  # as the CUDA programming guide describes CUDA_VISIBLE_DEVICES
    (None, [0, 1, 2, 3]), ("", []), ("2", [2]), ("3,1", [3, 1]), ("0, 2", [0, 2]), ("-1", []), ("1,-1,2", [1]),
    ("1,9,2", [1]), ("GPU-00000002-1234,GPU-00000000-1234", [2, 0]), ("GPU-00000003", [3]), ("GPU-0000", []),
    ("NoDevFiles", []), ("0,0", [0]),
])
def test_cuda_visible_devices_is_heeded(four, monkeypatch, given, numbers):
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert [one.number for one in gpus.visible()] == numbers
    assert [gpus.own(rank).number for rank in range(3) if numbers] == (numbers * 3)[:3 if numbers else 0]


def test_a_driver_that_does_not_know_compute_capabilities_is_asked_again(tmp_path, monkeypatch):
    answers = [gpu(0, driver_version="470.57", memory__total="[N/A]")]
    monkeypatch.setenv("PATH", pretend(tmp_path, answers, unknown=("compute_cap",))["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus._nvidia_smi.cache_clear()
    [found] = gpus.visible()
    assert (found.driver, found.capability, found.memory) == ("470.57", 0.0, 0.0)


class Workers(World):
    """A world whose ranks say of themselves: host, UUID, GPUs that nvidia-smi lists, whether TensorFlow uses one, and
    what fails.
    """

    def __new__(cls, *rows):
        world = object.__new__(cls)
        world.__dict__.update(World(size=len(rows)).__dict__,
                              gather=lambda value, name: [(*row, None)[:5] for row in rows])
        return world

    def __init__(self, *rows):
        pass


@pytest.mark.parametrize("device, nccl, rows, message", [
    ("auto", False, [("h", None, 0, False)], None),
    ("auto", True, [("h", "a", 2, True), ("h", "b", 2, True)], None),
    ("auto", False, [("h", "a", 1, True)], None),
    ("auto", False, [("h", "a", 8, False)], "nvidia-smi lists 8 GPUs, but TensorFlow can use none"),
    ("auto", True, [("h1", "a", 1, True), ("h2", "b", 1, False)], "h2: nvidia-smi lists 1 GPU, but TensorFlow"),
    ("gpu", True, [("h", None, 0, False)], "--device=gpu: TensorFlow sees no GPU"),
    ("any", True, [("h", "a", 8, False)], None),
    ("cpu", False, [("h", "a", 8, False)] * 2, None),
    ("auto", False, [("h", "a", 2, True), ("h", "b", 2, True)], "Horovod is built without NCCL"),
    ("any", False, [("h", "a", 2, True), ("h", "b", 2, True)], "Horovod is built without NCCL"),
    ("auto", True, [("h", "a", 1, True), ("h", "a", 1, True)], "NCCL needs a separate GPU for each worker"),
    ("auto", False, [("h", "a", 1, True), ("h", "a", 1, True)], None),
    ("auto", True, [("h1", "a", 1, True), ("h2", "a", 1, True)], None),  # in two containers, say
    ("any", True, [("h1", "a", 1, True), ("h2", None, 0, False, "nvidia-smi fails: 7")], "^h2: nvidia-smi fails: 7; m"),
    ("cpu", True, [("h", None, 0, False, "nvidia-smi fails: 7")], None),
])
def test_what_would_go_wrong_is_reported(device, nccl, rows, message):
    if message is None:
        gpus.check(Workers(*rows), device, nccl)
    else:
        with pytest.raises(UserError, match=message) as problem:
            gpus.check(Workers(*rows), device, nccl)
        assert problem.value.on_all_ranks


@pytest.mark.trainings
@pytest.mark.parametrize("kind, workers, flags, said, code", [
    ("python", 1, (), ALL, 1), ("mpirun", 2, (), ALL, 1), ("python", 1, ("--device=gpu",), ALL, 1),
    ("python", 1, ("--device=cpu",), ALL, 0), ("python", 1, ("--dali_device=cpu",), ALL, 0),
    ("mpirun", 2, (), FAILS, 1), ("python", 1, ("--dali_device=cpu",), FAILS, 1),
    ("python", 1, ("--device=cpu",), FAILS, 0)])
def test_gpus_that_cannot_be_used_end_a_training_in_a_line(tmp_path, monkeypatch, kind, workers, flags, said, code):
    for name, value in pretend(tmp_path, said, code=6 if said is FAILS else 0, on_bus=8).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # conftest hides GPUs from the tests
    done = run(kind, workers, ROOT / "train.py", *QUICK, *flags, f"--output_dir={tmp_path / 'run'}", cold=True)
    assert done.returncode == code, done.stderr
    if code:
        [line] = {line for line in done.stderr.splitlines() if "GPU" in line}
        assert "--device=cpu" in line and (
            "nvidia-smi fails: No devices were found; mend" in line if said is FAILS else
            "nvidia-smi lists 8 GPUs" in line and "uv sync --extra gpu" in line)
        assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
    else:
        assert json.loads(done.stdout)["epochs"] == 1


@pytest.mark.parametrize(("memory", "local_size", "limit"), [
    (16160, 2, 16160 - 3072), (81559, 1, 81559 - 3072), (4096, 1, None), (16160, 4, None)])  # two on each GPU
def test_tensorflow_leaves_memory_to_dali(memory, local_size, limit, tmp_path, monkeypatch):
    """A stand-in for TensorFlow's list of GPUs and its configuration of them, which needs GPUs."""
    monkeypatch.setenv("PATH", pretend(tmp_path, [gpu(n, memory__total=memory) for n in range(2)])["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus._nvidia_smi.cache_clear()
    devices, limits = [SimpleNamespace(name=f"/physical_device:GPU:{number}") for number in range(2)], []
    monkeypatch.setattr(world, "_usable_gpus", lambda device: devices)
    monkeypatch.setattr(world.hvd, "local_rank", lambda: 0)
    monkeypatch.setattr(world.hvd, "local_size", lambda: local_size)
    monkeypatch.setattr(world.tf.config, "set_visible_devices", lambda *_: None)
    monkeypatch.setattr(world.tf.config.experimental, "set_memory_growth", lambda *_: None)
    monkeypatch.setattr(world.tf.config, "set_logical_device_configuration",
                        lambda device, virtual: limits.append(*(one.memory_limit for one in virtual)))
    assert world._own_gpu("auto") == 0
    gpus._nvidia_smi.cache_clear()
    assert limits == [limit] * bool(limit)


def test_without_gpus_a_device_that_is_asked_for_is_an_error():
    done = run("python", 1, ROOT / "train.py", *QUICK, "--device=gpu")
    assert done.returncode == 1 and "--device=gpu: TensorFlow sees no GPU" in done.stderr


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that pretends what nvidia-smi says, its exit code, and the number of GPUs on the PCI bus."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(said: list, code: int = 0, on_bus: int = 0) -> None:
        environment = pretend(tmp_path, said, code=code, on_bus=on_bus)
        monkeypatch.setenv("PATH", environment["PATH"])
        monkeypatch.setattr(gpus, "PCI", Path(environment["BIGBATCH_PCI"]))
        gpus._nvidia_smi.cache_clear()

    yield make
    gpus._nvidia_smi.cache_clear()


LOST = "[Unknown Error], " + ", ".join(["[GPU is lost]"] * 6)
NO_HANDLE = "Unable to determine the device handle for GPU0000:{:02X}:00.0: Unknown Error"


@pytest.mark.parametrize(("said", "code", "message"), [  # by nvidia-smi 535, as users quote it
    (["No devices were found"], 6, "No devices were found"),
    (["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."], 9,
     "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
    ([NO_HANDLE.format(9)], 15, f"GPU 3 (0000:09:00.0): {NO_HANDLE.format(9)}"),
    (["Failed to initialize NVML: Driver/library version mismatch", "NVML library version: 535.183"], 18,
     "Failed to initialize NVML: Driver/library version mismatch; NVML library version: 535.183"),
    ([], 255, "exit code 255 without a message"), ([], 0, "exit code 0 without a message"),
    ([LOST] * 2, 0, "GPU 0 (0000:06:00.0): [Unknown Error], [GPU is lost]; "
                    "GPU 1 (0000:07:00.0): [Unknown Error], [GPU is lost]")])
def test_a_driver_that_fails_speaks_where_the_bus_has_gpus_only(machine, monkeypatch, said, code, message):
    machine(said, code)
    assert gpus.installed() == [] and gpus.failure() is gpus.without_driver() is None
    machine(said, code, on_bus=2 if LOST in said else 8)
    assert gpus.visible() == [] and gpus.failure() == f"nvidia-smi fails: {message}"
    assert gpus.failure("cpu") is gpus.without_driver() is None
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert gpus.failure() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-8ae1")
    assert gpus.failure()


@pytest.mark.parametrize(("line", "fault"), [
    (LOST, "[Unknown Error], [GPU is lost]"),
    ("3, GPU-00000003-1234, 00000000:09:00.0, Tesla V100, 535.183.01, [GPU requires reset], 7.0",
     "[GPU requires reset]"),
    (NO_HANDLE.format(9), NO_HANDLE.format(9))])
@pytest.mark.parametrize("code", [0, 15])
def test_one_lost_gpu_of_eight_is_named_and_may_be_left_out(machine, monkeypatch, line, fault, code):
    numbers = [0, 1, 2, 4, 5, 6, 7]
    machine([*map(gpu, numbers[:3]), line, *map(gpu, numbers[3:])], code, on_bus=8)
    assert [one.number for one in gpus.visible()] == numbers
    assert gpus.failure() == f"nvidia-smi fails: GPU 3 (0000:09:00.0): {fault}"
    for chosen, works in (("0,1,2", True), ("GPU-00000004,6", True), ("2,3", False), ("3", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert (gpus.failure() is None) == works


@pytest.mark.parametrize(("said", "code"), [
    ([gpu(0)], 0), ([gpu(0, memory__total="[N/A]"), gpu(1, memory__total="[Insufficient Permissions]")], 0),
    (["WARNING: infoROM is corrupted at gpu 0000:06:00.0", gpu(0)], 14)])
def test_fewer_gpus_than_on_the_bus_are_no_failure(machine, said, code):
    """As in a container that has one of eight."""
    machine(said, code, on_bus=8)
    assert gpus.visible() and gpus.failure() is gpus.without_driver() is None


def test_a_lost_gpu_of_a_container_has_no_bus_id(machine):
    """The bus has seven that the container may not use."""
    machine([gpu(0), f"1, {LOST}"], on_bus=8)
    assert gpus.failure() == "nvidia-smi fails: GPU 1: [Unknown Error], [GPU is lost]"


def test_an_nvidia_smi_that_hangs_is_given_up(machine, tmp_path, monkeypatch):
    """Its child keeps its output open after it is killed, as a process that hangs in the driver does."""
    machine([], on_bus=1)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nsleep 600 &\necho $! >{tmp_path}/child\nwait\n")
    monkeypatch.setattr(gpus, "PATIENCE", 1)
    assert gpus.failure() == "nvidia-smi fails: no answer within 1 s"
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_without_nvidia_smi_the_gpus_on_the_bus_are_a_line(machine, tmp_path, monkeypatch, capsys):
    machine([], on_bus=2)
    (tmp_path / "nvidia-smi").unlink()
    assert gpus.failure() is None
    gpus.check(World(), "auto", nccl=False)
    assert "no GPU is used: PCI shows 2 of NVIDIA, but there is no nvidia-smi" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpus.check(World(), "auto", nccl=False)
    gpus.check(World(), "cpu", nccl=False)
    assert capsys.readouterr().err == ""
