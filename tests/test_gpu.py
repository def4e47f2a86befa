"""What only a GPU can show of a training: `pytest -m gpu`, which benchmarks/first_gpu_hour.sh runs.

With BIGBATCH_PRETEND_GPU=1 they run on the CPU, and do not insist on a GPU: that is how they are tried without one.
"""
import json
import math
import re
import signal
from collections import Counter

import numpy as np
import pytest
from conftest import DIGITS, PRETEND_GPU, rows, run, train, weights

from distributed import gpus
from tests.rigs.trainings import differences, newest_step, start, trainers, wait_for
from training.weight_check import DIFFER

pytestmark = pytest.mark.gpu
DEVICE = "--device=auto" if PRETEND_GPU else "--device=gpu"  # which is an error where TensorFlow can use none
SMALL = (DIGITS, DEVICE, "--model=convnet", "--optimizer=sgd", "--learning_rate=0.02", "--warmup=none")
EXACT = (DIGITS, DEVICE, "--model=resnet20", "--image_size=8", "--deterministic", "--epochs=4",
         "--checkpoint_every=0.1")


def trained(folder, *flags, **options):
    """A finished training; on a GPU by a Python of its own, since CUDA does not survive a fork."""
    return train(*flags, f"--output_dir={folder}", cold=not PRETEND_GPU, **options)


def layers(folder) -> dict[str, np.ndarray]:
    """The model's weights in the newest checkpoint, batch norm's statistics and the optimizer's buffers left out."""
    found = {name: value for name, value in weights(folder).items()
             if name.startswith("model/") and "moving" not in name and "normalization/" not in name}
    assert found
    return found


@pytest.fixture(scope="module")
def initial(tmp_path_factory):
    """Folder of one update by SMALL at a rate of zero: the weights that training starts from."""
    folder = tmp_path_factory.mktemp("initial")
    trained(folder, *SMALL, "--learning_rate=0", "--epochs=0.1")
    return folder


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Folder of an undisturbed training by EXACT."""
    folder = tmp_path_factory.mktemp("exact")
    trained(folder, *EXACT)
    return folder


def test_a_step_changes_every_weight_and_the_loss_is_finite(initial, tmp_path):
    trained(tmp_path, *SMALL, "--epochs=0.1")
    assert json.loads((tmp_path / "plan.json").read_text())["steps"] == 1
    before, after = layers(initial), layers(tmp_path)
    assert [name for name in before if np.array_equal(before[name], after[name])] == []
    assert all(np.isfinite(value).all() for value in after.values())
    assert math.isfinite(rows(tmp_path)[-1]["train_loss"]) and math.isfinite(rows(tmp_path)[-1]["val_loss"])


def test_deterministic_gives_the_same_bits_again(exact, tmp_path):
    trained(tmp_path, *EXACT)
    assert differences(exact, tmp_path) == []
    assert rows(exact)[-1]["train_top1"] > 0.5


def test_a_training_that_was_stopped_and_goes_on_is_one_that_never_was(exact, tmp_path):
    folder = tmp_path / "stopped"
    launcher = start(folder, 1, EXACT)
    wait_for(lambda: newest_step(folder) >= 2, launcher)
    trainers(launcher)[0].send_signal(signal.SIGUSR1)
    assert launcher.wait(300) == 75, (tmp_path / "stopped.log").read_text()[-3000:]
    reached = newest_step(folder)
    assert start(folder, 1, EXACT).wait(300) == 0
    assert f"resumed after step {reached} of" in (tmp_path / "stopped.log").read_text()
    assert differences(exact, folder) == []


# Runs train.py while TensorFlow logs the device of each operation, between two marks around the first step.
PLACEMENT = """
import sys
import tensorflow as tf
tf.debugging.set_log_device_placement(True)
import train
from training import build
make_step = build.make_train_step
def make_marked_step(*arguments, **options):
    step = make_step(*arguments, **options)
    def marked(*inputs):
        print("STEP BEGINS", file=sys.stderr, flush=True)
        result = step(*inputs)
        print("STEP ENDS", file=sys.stderr, flush=True)
        return result
    marked.get_concrete_function = step.get_concrete_function
    return marked
build.make_train_step = make_marked_step
sys.exit(train.main(["train.py", *sys.argv[1:]]))
"""
PLACED = re.compile(r"placer\.cc:\d+\] (\S+): \((\w+)\): \S*device:([A-Z_]+):\d+")
# Operations that may run on the CPU of a machine with GPUs: a call of Python, which is training.clock, and those that
# compute nothing. int32 constants and shapes live in host memory, but count as operations of the GPU.
ON_THE_HOST = {"PyFunc", "_Arg", "_Retval", "NoOp"}


def placements(log: str) -> Counter:
    """(type of operation, type of device) of the placer's lines about the first step; some are logged twice."""
    step = log.partition("STEP BEGINS")[2].partition("STEP ENDS")[0]
    return Counter((operation, device) for _, operation, device in {found.groups() for found in PLACED.finditer(step)})


@pytest.mark.parametrize("model", ["resnet20", "convnet"])
def test_every_operation_of_a_step_runs_on_the_gpu(tmp_path, monkeypatch, model):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")  # the placer's lines have the lowest level
    done = run("python", 1, "-c", PLACEMENT, DEVICE, f"--model={model}", "--image_size=32", "--data_dir=synthetic:16",
               "--batch_size=8", "--epochs=1", f"--output_dir={tmp_path}", cold=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found, wanted = placements(done.stderr), "CPU" if PRETEND_GPU else "GPU"
    assert sum(count for (_, device), count in found.items() if device == wanted) > 100
    assert {operation for operation, device in found if device != wanted} <= ON_THE_HOST


def test_the_placements_are_those_of_the_step():
    def line(name, operation, device):
        return f"2026-11-22: I tensorflow/core/placer.cc:125] {name}: ({operation}): /job:localhost/device:{device}:0\n"

    step = line("conv1", "Conv2D", "GPU") + line("conv2", "Conv2D", "GPU") + line("norm", "L2Loss", "CPU")
    log = line("start", "Mul", "CPU") + f"STEP BEGINS\n{step}{step}STEP ENDS\n" + line("end", "Add", "CPU")
    assert placements(log) == {("Conv2D", "GPU"): 2, ("L2Loss", "CPU"): 1}


def test_nccl_with_two_ranks_gives_both_the_same_weights(tmp_path, monkeypatch):
    if not PRETEND_GPU and (count := len(gpus.visible())) < 2:
        pytest.skip(f"needs two GPUs, here is {count}")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    done = trained(tmp_path, *SMALL, "--epochs=1", f"--timeline={tmp_path}/timeline.json", kind="mpirun", workers=2)
    assert "allreduce" in (tmp_path / "timeline.json").read_text().lower()
    assert json.loads(done.stdout.splitlines()[-1])["world_size"] == 2
    assert DIFFER not in done.stderr
    assert PRETEND_GPU or "NCCL INFO" in done.stdout + done.stderr


def test_alexnet_trains(tmp_path):
    """With groups, local response normalisation and dropout, which are kernels of their own on a GPU."""
    trained(tmp_path, DIGITS, DEVICE, "--model=alexnet", "--image_size=67", "--optimizer=sgd", "--learning_rate=0.001",
            "--warmup=none", "--batch_size=64", "--epochs=0.1")
    [row] = rows(tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["steps"] == 2
    assert math.isfinite(row["train_loss"]) and math.isfinite(row["val_loss"])


@pytest.fixture(scope="module")
def without_xla(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without-xla")
    done = trained(folder, *SMALL, "--epochs=0.5", "--xla=false")
    assert "using XLA" not in done.stderr
    return folder


@pytest.mark.parametrize("xla", ["true", "auto"])
def test_xla_trains_to_nearly_the_same_weights(initial, without_xla, tmp_path, xla):
    done = trained(tmp_path, *SMALL, "--epochs=0.5", f"--xla={xla}")
    assert "Compiled cluster using XLA" in done.stderr
    first, plain, compiled = layers(initial), layers(without_xla), layers(tmp_path)
    for name, start_value in first.items():
        moved = np.linalg.norm(plain[name] - start_value)
        assert moved > 0 and np.linalg.norm(compiled[name] - plain[name]) < 0.05 * moved, name


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_trains(tmp_path, precision):
    trained(tmp_path, *SMALL, "--image_size=8", "--learning_rate=0.1", "--epochs=3", f"--precision={precision}")
    losses = [row["train_loss"] for row in rows(tmp_path)]  # 8 pixels: a CPU is slow at float16
    assert losses[2] < losses[1] < losses[0] and losses[2] < 0.95 * math.log(10)  # what guessing has
    assert {value.dtype for value in layers(tmp_path).values()} == {np.dtype("float32")}
