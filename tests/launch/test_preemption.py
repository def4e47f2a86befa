"""A notice of preemption before training: train.sbatch requeues the job, and train.py and launch/dgx1.sh end with 75.

Slurm's and MPI's programs are stand-ins here; test_slurm.py has the real ones.
"""
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BIN, ROOT, environment

SBATCH, DGX1 = ROOT / "launch" / "slurm" / "train.sbatch", ROOT / "launch" / "dgx1.sh"
# What the job does at the notice: a word of the command that hangs then, and what the job is started with. The last two
# start workers, of which one has no handler yet; srun ends the others by SIGTERM, whose code is higher.
PHASES = {"looking for a launcher": ("mpi4py", {}),
          "checking the nodes": ("launch.preflight", {"BIGBATCH_LAUNCHER": "mpirun"}),
          "mpirun": ("train.py", {"BIGBATCH_LAUNCHER": "mpirun", "BIGBATCH_NO_PREFLIGHT": "yes"}),
          "srun": ("train.py", {"BIGBATCH_LAUNCHER": "srun", "BIGBATCH_NO_PREFLIGHT": "yes"})}
HANGS = """#!/bin/sh
case "$0" in */srun) trap 'exit 143' USR1 ;; esac
case "$*" in *$HANGING*) touch reached; until [ -e over ]; do sleep 0.1; done; exit ${CODE-0} ;; esac
"""


@pytest.fixture
def node(tmp_path):
    """A function that starts a script with variables and stand-ins for Slurm and MPI, and waits until one hangs."""
    started = []
    for name, program in {"mpirun": HANGS, "srun": HANGS, "squeue": "#!/bin/sh\necho ${STATE-RUNNING}\n",
                          "scontrol": '#!/bin/sh\necho "$@" >>asked; touch over\n',  # Slurm ends the job's steps
                          "python": f'#!/bin/sh\nexec "{BIN}/python" "$@"\n',
                          "timeout": '#!/bin/sh\n[ "${1#-}" = "$1" ] || shift\n'
                                     'echo "$1" >>limits\nshift\nexec "$@"\n'}.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)

    def start(script=SBATCH, **variables):
        started.append(subprocess.Popen(
            ["bash", script, "digits"], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(Path.home()),  # which has a cache of the digits
                 "BIGBATCH_PYTHON": f"{tmp_path}/python", "SLURM_NTASKS": "2176", "BIGBATCH_ROOT": str(ROOT),
                 "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_NODELIST": "n[1-544]", "SLURM_JOB_ID": "7",
                 "SLURM_NNODES": "544"} | variables))
        deadline = time.monotonic() + 300
        while not (tmp_path / "reached").exists():
            assert started[-1].poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        return started[-1]

    yield start
    (tmp_path / "over").touch()
    for process in started:
        process.communicate(timeout=300)


@pytest.mark.parametrize("phase", PHASES)
def test_a_notice_before_training_requeues_the_job(phase, node, tmp_path):
    hanging, variables = PHASES[phase]
    job = node(HANGING=hanging, **variables)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(300) == 75 and (tmp_path / "asked").read_text() == "requeue 7\n"


def test_a_stop_of_dgx1_before_training_is_75(node):
    script = node(DGX1, HANGING="launch.preflight")
    script.terminate()
    assert script.wait(300) == 75


def test_a_job_that_is_cancelled_before_training_is_not_requeued(node, tmp_path):
    job = node(HANGING="mpi4py")
    job.terminate()
    assert job.wait(300) == 75 and not (tmp_path / "asked").exists()
    assert int((tmp_path / "limits").read_text()) > 1000  # seconds until so many workers have to find each other


@pytest.mark.parametrize("launcher, code", [("mpirun", 75), ("srun", 1)])
def test_a_worker_that_fails_before_training_is_no_notice(launcher, code, node, tmp_path):
    """srun ends the others by SIGTERM, on which they exit with 75, and then exits with the highest code."""
    job = node(HANGING="train.py", CODE="75", BIGBATCH_LAUNCHER=launcher, BIGBATCH_NO_PREFLIGHT="yes")
    (tmp_path / "over").touch()
    assert job.wait(300) == code and (tmp_path / "asked").exists() == (code == 75)


NOTICED = """
import os, runpy, signal, sys

class Noticed:
    def find_spec(self, name, *_):
        if name.partition(".")[0] not in (*sys.stdlib_module_names, "common", "training"):
            os.kill(os.getpid(), signal.{signal})

if os.environ.get("OMPI_COMM_WORLD_RANK", "1") == "1":
    sys.meta_path.insert(0, Noticed())
sys.argv = ["train.py", "--epochs=1"]
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize("number, launcher", [
    (signal.SIGTERM, []), (signal.SIGUSR1, []),
    (signal.SIGUSR1, [BIN / "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"])])
def test_a_request_while_train_py_imports_is_75(number, launcher):
    """The signal comes at the first import from outside the standard library and common/, in one of the workers."""
    done = subprocess.run([*launcher, sys.executable, "-c", NOTICED.format(signal=number.name)], cwd=ROOT, text=True,
                          capture_output=True, timeout=300, env=environment())
    assert done.returncode == 75 and "stopped on request; there was nothing to save" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


LATE = """
import os, runpy, signal, sys

class Late:
    def __del__(self, kill=os.kill, process=os.getpid()):
        kill(process, signal.{signal})

sys.modules["late"] = Late()
sys.argv = ["{program}", *sys.argv[1:]]
runpy.run_module("{program}", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("program, words", [("train", ["--dry_run"]), ("launch.horovodrun", ["--dry-run", "digits"])])
def test_a_request_while_python_ends_changes_nothing(program, words, number):
    """It comes after Python has given signals their default actions back, which kill."""
    code = LATE.format(program=program, signal=number.name)
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, text=True, capture_output=True,
                          timeout=300, env=environment())
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
