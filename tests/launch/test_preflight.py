import json
import os
import subprocess

import pytest
from conftest import BIN, ROOT, run

from distributed.gpus import MEND
from launch import facts
from launch.preflight import SYNC, problems, table, time_limit
from tests.rigs.gpus import gpu, pretend

GOOD = {"host": "h1", "slots": 8, "gpus": ["V100"] * 8, "driver": "535.1", "capability": 7.0,
        "python": "3.11.7", "tensorflow": "2.15.1", "horovod": "0.28.1", "dali": "2.4.0",
        "source": "abcd", "dataset": "1234", "output": True, "disk": 100.0,
        "shared_memory": 10.0, "infiniband": "usable", "pinnable": None}


def hosts(**changed):
    """Three hosts, of which the second differs."""
    return [GOOD, GOOD | {"host": "h2"} | changed, GOOD | {"host": "h3"}]


def test_equal_hosts_have_no_problem_and_no_mark():
    assert problems(hosts(), "data") == [] and "*" not in table(hosts())
    assert len(table(hosts()).splitlines()) == 4


@pytest.mark.parametrize("changed, message", [
    ({"tensorflow": "2.14.0"}, "h2: TensorFlow is 2.14.0, but 2.15.1 elsewhere; " + SYNC),
    ({"horovod": "missing"}, "h2: Horovod is not installed; " + SYNC),
    ({"source": "ffff"}, "h2: bigbatch is ffff, but abcd elsewhere; update the checkout or the image there"),
    ({"dataset": "missing"}, "h2: there is no dataset in data; --data_dir must point to the same dataset"),
    ({"dataset": "9999"}, "h2: dataset is 9999, but 1234 elsewhere; --data_dir must point to the same dataset"),
    ({"gpus": ["V100"] * 7}, "h2: 7 GPUs for 8 workers; start 7 there, or look for missing GPUs with nvidia-smi"),
    ({"output": False}, "h2: the output folder is not writable; choose another --output_dir"),
    ({"disk": 0.5}, "h2: 0.50 GB free for --output_dir, less than 1; free disk space"),
    ({"dataset": "empty"}, "h2: the folder data is empty; mount the dataset there"),
    ({"shared_memory": 0.064}, "h2: 0.06 GB free in /dev/shm, less than 0.25; start the container with --ipc=host or "
                               "--shm-size=1g; in a pod, mount an emptyDir of medium Memory"),
    ({"infiniband": "none"}, "h2: no InfiniBand, which other hosts have; run ibstat there, or set NCCL_IB_DISABLE=1 to "
                             "train over TCP"),
    ({"infiniband": "missing"}, "h2: /dev/infiniband is missing; give the container its devices (docker run "
                                "--device=/dev/infiniband; with Enroot or Pyxis, MELLANOX_VISIBLE_DEVICES=all in the "
                                "job's environment; with Apptainer, APPTAINER_BIND=/dev/infiniband; in Kubernetes, a "
                                "device plugin's resource), or set NCCL_IB_DISABLE=1 to train over TCP"),
    ({"pinnable": 0.008}, "h2: a process may lock 8 MB of memory, too little for RDMA; set memlock to unlimited: in "
                          "limits.conf, docker run --ulimit memlock=-1, or LimitMEMLOCK of Kubernetes' containerd"),
    ({"clock": -3.0}, "h2: the clock differs by -3.0 s from that of h1; synchronize both with chrony or NTP"),
    ({"gpu_failure": "nvidia-smi fails: GPU 3: lost"}, f"h2: nvidia-smi fails: GPU 3: lost; {MEND}"),
    ({"driver": "530.2"}, "h2: driver is 530.2, but 535.1 elsewhere; install the same driver"),
])
def test_what_would_break_a_run_is_reported_with_its_cure(changed, message):
    assert problems(hosts(**changed), "data") == [message]


@pytest.mark.parametrize("gpus, driver, capability, message", [
    ("V100", "525.60", 7.0, None), ("A100", "535.54", 8.0, None), ("H100", "550.1", 9.0, None),
    ("V100", "470.82", 7.0, "driver 470.82 is too old for the GPU V100; install 525 or newer"),
    ("A100", "530.30", 8.0, "driver 530.30 is too old for the GPU A100; install 535 or newer"),
    ("B200", "570.1", 10.0, "TensorFlow 2.15 does not support the GPU B200 (compute capability 10.0); the newest that "
                            "it supports are H100 and H200 (9.0)"),
    ("V100", "", 0.0, None),
])
def test_a_gpu_that_tensorflow_or_its_driver_does_not_know(gpus, driver, capability, message):
    host = GOOD | {"gpus": [gpus] * 8, "driver": driver, "capability": capability}
    assert problems([host], "data") == ([f"h1: {message}"] if message else [])


@pytest.mark.launchers
@pytest.mark.parametrize("one_each, workers, gpus", [(True, 2, 2), (False, 3, 2)])
def test_the_gpus_of_a_host_are_those_of_all_its_workers(tmp_path, monkeypatch, one_each, workers, gpus):
    """As in a Slurm job that gives each task one. TensorFlow can use none of these: --dali_device=cpu goes on."""
    for name, value in pretend(tmp_path, [gpu(0), gpu(1)], one_each).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    done = run("mpirun", workers, "-m", "launch.preflight", "--dali_device=cpu", f"--output_dir={tmp_path / 'new'}",
               cold=True)
    assert done.returncode == (workers != gpus) and f"  {gpus}     Tesla V100" in done.stdout, done.stdout + done.stderr
    assert (f"{gpus} GPUs for {workers} workers" in done.stderr) == (workers != gpus)


@pytest.mark.launchers
def test_gpus_that_tensorflow_cannot_use_are_a_line(tmp_path, monkeypatch):
    for said, line in (([gpu(0)], "nvidia-smi lists 1 GPU, but"), (
            ["Unable to determine the device handle for GPU0000:06:00.0: Unknown Error"],
            "preflight: nvidia-smi fails: GPU 0 (0000:06:00.0): Unable to determine the device handle for GPU0000:0")):
        for name, value in pretend(tmp_path, said, on_bus=1).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        done = run("python", 1, "-m", "launch.preflight", cold=True)
        assert done.returncode == 1 and line in done.stderr and done.stdout == ""
    done = run("python", 1, "-m", "launch.preflight", "--device=cpu", cold=True)
    assert done.returncode == 0 and "Tesla" not in done.stdout, done.stderr


def test_what_differs_is_marked():
    line = table(hosts(gpus=["A100"] * 8, clock=3.0)).splitlines()[2]
    assert "A100*" in line and "+3.0*" in line and line.count("*") == 2


def test_rdma_counts_between_hosts_with_gpus():
    """One host does not need it, and Gloo and MPI do without."""
    assert problems([GOOD | {"infiniband": "missing"}], "data") == []
    assert problems([host | {"gpus": [], "infiniband": "missing"} for host in hosts()],
                    "data") == []
    assert problems([host | {"infiniband": "none", "pinnable": 0.008} for host in hosts()], "data") == []


def test_workers_may_share_a_gpu_when_asked_to():
    two = [GOOD | {"slots": 16}]
    assert problems(two, "data") == ["h1: 8 GPUs for 16 workers; start 8 there, or look for missing GPUs "
                                     "with nvidia-smi"]
    assert problems(two, "data", per_gpu=2) == []


@pytest.mark.parametrize("kind, workers", [("python", 1), ("mpirun", 3)])
def test_a_sound_machine_passes(kind, workers, tmp_path):
    done = run(kind, workers, "-m", "launch.preflight", f"--output_dir={tmp_path / 'new'}")
    assert done.returncode == 0, done.stderr
    heading, line, end = done.stdout.splitlines()
    assert end == "all checks passed"
    row = dict(zip(heading.replace("shm GB", "shm").replace("disk GB", "disk").replace("clock s", "clock")
                   .replace("GB/s in host", "within").replace("GB/s between", "between").split(),
                   line.replace("MPI Gloo", "").split(), strict=True))
    assert row["workers"] == str(workers) and row["GPUs"] == "0"
    assert row["TensorFlow"] == "2.15.1" and row["Horovod"] == "0.28.1" and row["output"] == "shared"
    assert (row["within"] != "-") == (workers > 1) and row["between"] == "-"
    assert not (tmp_path / "new").exists()


def test_the_time_limit_grows_with_the_job():
    """2,176 workers read their Python from one disk: at 100,000 calls a second, the last has it after 740 seconds."""
    assert time_limit(1, False) < 31 and time_limit(8, True) < 185
    assert time_limit(544 * 4, False) > 34_000 * 544 * 4 / 100_000


def test_what_is_wrong_ends_with_1_on_every_worker(tmp_path):
    (tmp_path / "file").touch()
    done = run("mpirun", 2, "-m", "launch.preflight", "--flagfile=recipes/digits.flags",
               f"--data_dir={tmp_path}", f"--output_dir={tmp_path / 'file'}")
    assert done.returncode == 1 and "missing" in done.stdout
    assert f"no dataset in {tmp_path}" in done.stderr and "Traceback" not in done.stderr
    assert "passed" not in done.stdout


def test_a_wrong_flag_is_2():
    done = run("python", 1, "-m", "launch.preflight", "--optimizer=adagrad")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("made, found", [
    ([], "missing"), (["data"], "empty"), (["data/train"], "empty"), (["data/train/cat"], "a folder of images"),
])
def test_a_folder_without_data(tmp_path, made, found):
    for folder in made:
        (tmp_path / folder).mkdir(parents=True)
    assert facts.dataset(str(tmp_path / "data")) == found


def test_data_far_away_is_not_missing():
    assert facts.dataset("s3://bucket/data") == "s3://bucket/data"


def test_a_login_node_learns_what_nvidia_smi_says_of_a_gpu(tmp_path):
    environment = os.environ | pretend(tmp_path, [gpu(0), "1, [GPU is lost]"], code=15, on_bus=2)
    environment.pop("CUDA_VISIBLE_DEVICES")
    for flags, failure in ((), "nvidia-smi fails: GPU 1 (0000:07:00.0): [GPU is lost]"), (["--device=cpu"], None):
        done = subprocess.run([BIN / "python", "-m", "launch.facts", *flags], cwd=ROOT, env=environment, text=True,
                              capture_output=True, timeout=300)
        assert json.loads(done.stdout)["gpu_failure"] == failure


def test_facts_need_neither_tensorflow_nor_horovod():
    done = subprocess.run([BIN / "python", "-c", "import sys, json; from launch import facts; from plan import "
                           "flags; print(json.dumps(facts.gather(flags.parse(['x']).recipe.data_dir, None))); "
                           "print([n for n in ('tensorflow', 'horovod', 'mpi4py') if n in sys.modules])"],
                          cwd=ROOT, text=True, capture_output=True, timeout=300)
    found, modules = done.stdout.splitlines()
    assert modules == "[]" and json.loads(found)["tensorflow"] == "2.15.1"
