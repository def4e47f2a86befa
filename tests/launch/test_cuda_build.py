"""Horovod compiled with NCCL where there is no GPU: the README's install for GPUs, and the image with CUDA."""
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import BIN, ROOT, environment, launcher, weights

from tests.rigs import container, cuda
from tests.rigs.container import check_output
from tests.rigs.cuda import IMAGE, STORE

pytestmark = pytest.mark.cuda_build
TRAINING = ("--model=convnet", "--optimizer=sgd", "--learning_rate=0.02", "--warmup=none", "--epochs=1",
            "--deterministic")
IMPORTS = """
import tensorflow as tf
import nvidia.dali.plugin.tf
import horovod.tensorflow as hvd
hvd.init()
print(hvd.nccl_built(), hvd.size(), tf.config.list_physical_devices("GPU"))
"""
ALL_THERE = "21605 1 []"  # compiled with NCCL 2.16.5, one worker, no GPU
LINKED = "ldd $(python -c 'import sys; print(sys.prefix)')/lib/python3.11/site-packages/horovod/tensorflow/mpi_lib.*.so"


def operations(check_build: str) -> set[str]:
    """What `horovodrun --check-build` marks as there."""
    return {line.split()[-1] for line in check_build.splitlines() if "[X]" in line}


def libnccl(ldd: str) -> str:
    """The path of the file that the loader takes."""
    [path] = [line.split()[2] for line in ldd.splitlines() if line.split()[0] == "libnccl.so.2"]
    return os.path.normpath(path)


def assert_same_training(folder: Path, other: Path, workers: int) -> None:
    """Both trainings had so many workers, and their weights are equal to the bit."""
    assert [json.loads((run / "summary.json").read_text())["world_size"] for run in (folder, other)] == [workers] * 2
    ours, theirs = weights(folder), weights(other)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []


# --- the README's install ---

@pytest.fixture(scope="module")
def installed():
    """A fresh environment."""
    cuda.make_tree()
    with tempfile.TemporaryDirectory(dir=STORE) as folder:
        assert "Built horovod==0.28.1" in cuda.install(Path(folder))
        yield Path(folder)


@pytest.fixture
def run(installed):
    """A function that runs a command as one would in that environment, without the variables of the compilation."""
    variables = {name: value.replace(str(BIN), f"{installed}/bin") for name, value in environment().items()
                 if name != "LD_LIBRARY_PATH"}

    def run(*words) -> str:
        return check_output(*(str(word).replace(str(BIN), f"{installed}/bin") for word in words), cwd=ROOT, timeout=300,
                            env=variables | cuda.own(installed))

    return run


def test_uv_run_keeps_the_horovod_with_nccl(run):
    assert operations(run("uv", "run", "--frozen", "horovodrun", "--check-build")) >= {"NCCL", "MPI", "Gloo"}


def test_the_run_path_alone_leads_to_the_nccl_of_the_environment(run, installed):
    nccl = f"{installed}/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"
    assert libnccl(run("sh", "-c", LINKED)) == nccl


def test_all_import_without_a_driver(run):
    assert run("python", "-c", IMPORTS) == ALL_THERE


@pytest.mark.parametrize("kind, workers, flags", [
    ("horovodrun", 2, ()), ("mpirun", 2, ()), ("mpirun", 4, ("--allreduce=torus",)),
])
def test_trains_on_cpus_as_without_nccl(run, train_once, kind, workers, flags, tmp_path):
    run(*launcher(kind, workers, cold=True), ROOT / "train.py", *TRAINING, *flags, f"--output_dir={tmp_path}")
    assert_same_training(tmp_path, train_once(*TRAINING, *flags, kind=kind, workers=workers), workers)


def test_preflight_passes(run, tmp_path):
    printed = run(*launcher("mpirun", 2, cold=True), "-m", "launch.preflight", f"--output_dir={tmp_path}")
    _, host, verdict = printed.splitlines()
    assert "NCCL" in host and verdict == "all checks passed"


# --- the image ---

@pytest.fixture(scope="module")
def engine():
    """Debian with CUDA and NCCL is the base; no variable says that Horovod shall use them."""
    yield from container.engine(IMAGE, cuda.make_base)


def in_image(engine, *words, options=()) -> str:
    return check_output(engine, "run", "--rm", *options, IMAGE, *words, timeout=300)


def test_the_image_has_horovod_with_the_nccl_of_its_base(engine):
    assert operations(in_image(engine, "horovodrun", "--check-build")) >= {"NCCL", "MPI", "Gloo"}
    assert libnccl(in_image(engine, "sh", "-c", LINKED)).endswith("/lib/x86_64-linux-gnu/libnccl.so.2")


def test_all_import_in_the_image(engine):
    assert in_image(engine, "python", "-c", IMPORTS) == ALL_THERE


def test_two_workers_train_in_the_image_as_without_nccl(engine, train_once, tmp_path):
    tmp_path.chmod(0o777)  # the image's user is not this one
    in_image(engine, "mpirun", "--oversubscribe", "-np", "2", "python", "train.py", *TRAINING,
             "--output_dir=/output/run", options=["--shm-size=512m", f"--volume={tmp_path}:/output"])
    assert_same_training(tmp_path / "run", train_once(*TRAINING, kind="mpirun", workers=2), 2)
