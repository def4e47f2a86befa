"""What a worker's start does, and does not do."""
import os

import pytest
from conftest import run

SINGLE_WORKER = """
import os
from distributed import world
before = dict(os.environ)
worker = world.start(0)
import horovod.tensorflow as hvd
left = {name for name in os.environ if name.startswith("HOROVOD_")}
print(worker.rank, worker.size, hvd.size(), hvd.mpi_enabled(), sorted(left))
"""


@pytest.mark.parametrize(("variable", "by_mpi"), [(None, False), ("SLURM_JOB_ID", True), ("PMI_RANK", True)])
def test_a_single_worker_starts_without_mpi(monkeypatch, variable, by_mpi):
    """And leaves nothing in the environment that a launcher under it would take for a world of one."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PMI", "OMPI_COMM_", "HOROVOD_"))]:
        monkeypatch.delenv(name)
    if variable:
        monkeypatch.setenv(variable, "0")
    done = run("python", 1, "-c", SINGLE_WORKER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "1", str(by_mpi), "[]"]


CONVERTED = """
import sys
from tensorflow.python.autograph.impl import api
import train
convert, converted = api._convert_actual, []
api._convert_actual = lambda function, *rest: converted.append(function) or convert(function, *rest)
code = train.main(["train.py", "--epochs=0.1", "--batch_size=64", "--micro_batch_size=16", *sys.argv[1:]])
print(len(converted), sorted({function.__qualname__ for function in converted}), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.trainings
@pytest.mark.parametrize("workers", [1, 2])
def test_autograph_converts_nothing(workers, tmp_path):
    """It took most of a start: 1,449 functions of Horovod, Keras and ours."""
    done = run("mpirun" if workers > 1 else "python", workers, "-c", CONVERTED, "--image_size=16",
               "--batch_norm_statistics=exact", "--log_trust_ratios", "--compression=fp16", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.endswith("]")] == ["0 []"] * workers
