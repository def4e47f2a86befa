"""What a worker does by its launcher's variables, before Horovod is loaded."""
import os
import subprocess
import sys

import psutil
import pytest
from conftest import ROOT, environment, launcher

from common.errors import UserError
from common.launcher import LAUNCHERS, OTHERS, Launched, launched

WORKER = """
import os, time
from common.launcher import end_with_launcher
end_with_launcher()
parent = os.getppid()
print("under way", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(1)
print("alive", flush=True)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
PROGRAM = """
import sys, time
from common import command

@command.program("program")
def main(argv):
    print("under way", flush=True)
    time.sleep(float(argv[1]))
    print("alive", flush=True)

main(sys.argv)
"""
# As horovodrun starts a worker: its variables are the shell's words. The shell lives on.
LAUNCHER = "import subprocess, sys; subprocess.run(['sh', '-c', '\"$@\"; :', '', *sys.argv[1:]])"
WRAPPER = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def without_launcher() -> dict[str, str]:
    return {name: value for name, value in environment().items() if not name.startswith(LAUNCHERS)}


@pytest.mark.parametrize(("variables", "said"), [
    ({"HOROVOD_RANK": "0"}, ""), ({"OMPI_COMM_WORLD_RANK": "0"}, ""), ({"PMIX_RANK": "0"}, ""), ({}, "alive\n")])
def test_a_worker_ends_with_its_launcher_and_otherwise_outlives_its_parent(variables, said):
    """The parent ends by SIGKILL, which leaves it no time to end the worker."""
    with subprocess.Popen([sys.executable, "-c", PARENT, WORKER], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                          env=without_launcher() | variables) as parent:
        assert parent.stdout.readline() == "under way\n"
        parent.kill()
        assert parent.stdout.read() == said  # up to the end of the worker


@pytest.mark.parametrize(("variables", "seconds", "said"), [
    (["HOROVOD_RANK=0"], 20, ""), (["HOROVOD_RANK=0", sys.executable, "-c", WRAPPER], 20, ""), ([], 1.5, "alive\n")])
def test_a_worker_ends_with_its_launcher_whatever_lives_on_between_them(variables, seconds, said):
    worker = ["env", *variables, sys.executable, "-c", PROGRAM, str(seconds)]
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, *worker], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                          env=without_launcher(), start_new_session=True) as started:
        assert started.stdout.readline() == "under way\n"
        started.kill()
        assert started.stdout.read() == said  # up to the end of the worker


def test_a_worker_without_a_descriptor_to_look_with_lives_on():
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))"
    program = PROGRAM.replace('    print("under way", flush=True)', f"    {limited}")
    done = subprocess.run([sys.executable, "-c", LAUNCHER, sys.executable, "-c", program, "1.5"], cwd=ROOT, text=True,
                          capture_output=True, env=without_launcher() | {"HOROVOD_RANK": "0"})
    assert done.stdout == "alive\n", done.stderr


@pytest.mark.launchers
@pytest.mark.parametrize("kind", ["horovodrun", "mpirun"])
def test_no_worker_outlives_the_processes_of_its_launcher(kind):
    """SIGKILL, also to those that horovodrun has between itself and the shells of its workers."""
    words = [*launcher(kind, 2)[:-1], sys.executable, "-c", PROGRAM, "60"]  # whose child a fork would not be
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()) as started:
        for _ in range(2):
            assert started.stdout.readline().endswith("under way\n")
        below = psutil.Process(started.pid).children(recursive=True)
        workers = [process for process in below if process.cmdline()[1:3] == ["-c", PROGRAM]]
        assert len(workers) == 2
        for process in [started, *(process for process in below if process not in workers and process.name() != "sh")]:
            process.kill()
        assert not psutil.wait_procs(workers, timeout=10)[1]


@pytest.fixture
def variables(monkeypatch):
    """Gives this process a launcher's variables in place of those that it has."""
    def replace(**values):
        for name in [name for name in os.environ if name.startswith((*LAUNCHERS, *OTHERS, "HOROVOD_"))]:
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return replace


IN_A_STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize("values", [
    IN_A_STEP, IN_A_STEP | {"PMI_RANK": "1", "PMI_SIZE": "2"}, {"PMI_RANK": "0", "PMI_SIZE": "2"},
    {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "16"}, {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4"},
    {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "6"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_several_processes_without_a_rank_are_an_error(values, variables):
    variables(**values)
    with pytest.raises(UserError, match=r"each process would work alone; start them with horovodrun --gloo or mpirun"):
        launched()


@pytest.mark.parametrize(("values", "expected"), [
    ({}, Launched()),
    ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, Launched()),  # an interactive job, a batch script
    ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_LOCALID": "0"}, Launched()),
    ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launched()),
    (IN_A_STEP | {"SLURM_PTY_PORT": "34529"}, Launched()),  # the shell of srun --pty
    (IN_A_STEP | {"PMIX_RANK": "1"}, Launched(1, 2, 1, 2)),  # srun --mpi=pmix
    ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1", "PMIX_RANK": "3"},
     Launched(3, 4, 1, 2)),
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "3", "SLURM_STEP_NUM_TASKS": "2",
      "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}, Launched(3, 8, 3, 4)),  # mpirun's daemons are a step
    ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
      "WORLD_SIZE": "4"}, Launched(1, 2, 1, 2))])
def test_ranks_and_sizes_are_the_launchers(values, expected, variables):
    variables(**values)
    assert launched() == expected
