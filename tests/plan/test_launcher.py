"""What a worker does by its launcher's variables, before Horovod is loaded."""
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from plan.launcher import LAUNCHERS

WORKER = """
import os, time
from plan.launcher import end_with_launcher
end_with_launcher()
parent = os.getppid()
print("under way", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(1)
print("alive", flush=True)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize(("variable", "said"), [
    ("HOROVOD_RANK", ""), ("OMPI_COMM_WORLD_RANK", ""), ("PMIX_RANK", ""), ("SHLVL", "alive\n")])
def test_a_worker_ends_with_its_launcher_and_one_without_outlives_its_shell(variable, said):
    """By SIGKILL, which leaves the launcher no time to end anything."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, WORKER], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                          env=others | {variable: "0", "PYTHONPATH": str(ROOT)}) as launcher:
        assert launcher.stdout.readline() == "under way\n"
        launcher.kill()
        assert launcher.stdout.read() == said  # up to the end of the worker
