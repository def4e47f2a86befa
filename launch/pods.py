"""Trains on the pods of an MPIJob: `python -m launch.pods OUTPUT_DIR [options] RECIPE [flags]`.

The launcher's container runs this module (launch/mpijob.py). What follows the run's folder, OUTPUT_DIR, goes to
launch/horovodrun.sh, which trains on the worker pods that the operator lists. It runs again after a worker or its pod
was lost or asked to stop, as soon as all pods answer, and continues from the newest checkpoint. A failure ends the job,
unless the run has a new checkpoint since its last start: an error that occurs again and again does not keep the GPUs.
"""
import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import command
from common.errors import ExitCode, UsageError, complain
from launch import hosts as host_lists
from reporting.run_folder import CHECKPOINTS

PROGRAM = "launch.pods"
SCRIPT = Path(__file__).with_name("horovodrun.sh")
HOSTFILE = "OMPI_MCA_orte_default_hostfile"  # set by the operator
TRAINERS = r"^\S*python -X \S+ \S*train\.py"
NOT_FOUND = 1  # pkill's exit code; ssh's is 255
PAUSE = 2  # seconds until pods that do not answer are asked again


def train(hosts: list[host_lists.Host], words: list[str], output_dir: Path) -> int:
    """Runs a training command, and again if a pod was lost or asked to stop. Returns the last exit code.

    On SIGTERM, the workers save a checkpoint and end.
    """
    stopped, training = threading.Event(), None

    def stop(*_):
        stopped.set()
        codes = on_all(hosts, "pkill", "-USR1", "-f", TRAINERS).values()
        if training and NOT_FOUND in codes and 0 not in codes:  # the preflight has nothing to save
            training.terminate()

    signal.signal(signal.SIGTERM, stop)
    while wait_for(hosts, stopped):
        if training:
            complain("the training continues from its newest checkpoint", PROGRAM)
        before = newest(output_dir)
        training = subprocess.Popen(words)
        code = training.wait()
        was_asked = stopped.is_set() or code == ExitCode.STOPPED
        if code in (ExitCode.DONE, ExitCode.USAGE) or not (was_asked or newest(output_dir) != before):
            return code
    return ExitCode.STOPPED


def wait_for(hosts: list[host_lists.Host], stopped: threading.Event) -> bool:
    """Waits until all pods answer. Returns False if a stop is requested."""
    reported = ""
    while not stopped.is_set():
        missing = ", ".join(name for name, code in on_all(hosts, "true").items() if code)
        if not missing:
            return True
        if missing != reported:
            complain(f"waiting for {missing}", PROGRAM)
        reported = missing
        stopped.wait(PAUSE)
    return False


def on_all(hosts: list[host_lists.Host], *words: str) -> dict[str, int]:
    """Returns the exit code of a command on each host, by its name: 255 if the host cannot be reached."""
    def code(host):
        with contextlib.suppress(OSError):  # a name is unknown until its pod is there
            command = host_lists.words(host.name, list(words))
            return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode
        return 255

    with ThreadPoolExecutor(len(hosts)) as pool:
        return dict(zip((host.name for host in hosts), pool.map(code, hosts), strict=True))


def newest(output_dir: Path) -> int | None:
    """Returns when the run's newest checkpoint was written, in nanoseconds, or None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return (output_dir / CHECKPOINTS / "checkpoint").stat().st_mtime_ns


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    with command.shell(PROGRAM) as ending:
        if len(argv) < 3:
            raise UsageError("give the run's folder, then what launch/horovodrun.sh takes")
        hostfile = os.environ.get(HOSTFILE, "/etc/mpi/hostfile")
        Path(os.environ["CUDA_CACHE_PATH"]).mkdir(parents=True, exist_ok=True)
        words = [str(SCRIPT), f"--hostfile={hostfile}", *argv[2:]]
        ending.code = train(host_lists.read(hostfile), words, Path(argv[1]))
    return ending.code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
