"""Which GPUs a worker takes, and that none stays idle without a word."""
import json
import os
from types import SimpleNamespace

import pytest
from conftest import DIGITS, ROOT, TINY, run

from common.errors import UserError
from distributed import gpus, world
from distributed.world import World
from tests.rigs.gpus import gpu, pretend

QUICK = (DIGITS, *TINY, "--epochs=1")


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
    """A world whose ranks say of themselves: host, UUID, GPUs that nvidia-smi lists, whether TensorFlow uses one."""

    def __new__(cls, *rows):
        world = object.__new__(cls)
        world.__dict__.update(World(size=len(rows)).__dict__, gather=lambda value, name: list(rows))
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
])
def test_what_would_go_wrong_is_reported(device, nccl, rows, message):
    if message is None:
        gpus.check(Workers(*rows), device, nccl)
    else:
        with pytest.raises(UserError, match=message) as problem:
            gpus.check(Workers(*rows), device, nccl)
        assert problem.value.on_all_ranks


@pytest.mark.trainings
@pytest.mark.parametrize("kind, workers, flags, code", [
    ("python", 1, (), 1), ("mpirun", 2, (), 1), ("python", 1, ("--device=gpu",), 1),
    ("python", 1, ("--device=cpu",), 0), ("python", 1, ("--dali_device=cpu",), 0)])
def test_gpus_that_tensorflow_cannot_use_end_a_training_in_a_line(tmp_path, monkeypatch, kind, workers, flags, code):
    for name, value in pretend(tmp_path, [gpu(number) for number in range(8)]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # conftest hides GPUs from the tests
    done = run(kind, workers, ROOT / "train.py", *QUICK, *flags, f"--output_dir={tmp_path / 'run'}", cold=True)
    assert done.returncode == code, done.stderr
    if code:
        [line] = {line for line in done.stderr.splitlines() if "GPU" in line}
        assert "nvidia-smi lists 8 GPUs" in line and "uv sync --extra gpu" in line and "--device=cpu" in line
        assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
    else:
        assert json.loads(done.stdout)["epochs"] == 1


SEES_A_GPU = """
import sys
import train
from distributed import world
world._usable_gpus = lambda device: ["GPU"] * (device != "cpu")
train.main(sys.argv)
"""


def test_plain_train_py_names_the_micro_batch_that_fits(tmp_path, monkeypatch):
    """The training itself fails, because there is no GPU."""
    monkeypatch.setenv("PATH", pretend(tmp_path, [gpu(0)])["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for flags, found in (([], ["--micro_batch_size=256"]), (["--micro_batch_size=128"], []), (["--device=cpu"], [])):
        done = run("python", 1, "-c", SEES_A_GPU, *QUICK, "--model=resnet50", "--batch_size=1024", "--dali_device=gpu",
                   f"--output_dir={tmp_path}", *flags)
        lines = [line for line in done.stderr.splitlines() if "suits the GPUs' memory" in line]
        assert [flag in line for line in lines for flag in found] == [True] * len(found) == [True] * len(lines)


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


def test_an_nvidia_smi_that_cannot_speak_lists_no_gpu(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho Unable to determine the device handle for GPU 0000:06:00.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    gpus._nvidia_smi.cache_clear()
    assert gpus.installed() == []
    gpus._nvidia_smi.cache_clear()
