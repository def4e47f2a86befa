"""What a worker does by its launcher's variables, before Horovod is loaded."""
import subprocess
import sys

import pytest
from conftest import ROOT, environment

from common.launcher import LAUNCHERS

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


@pytest.mark.parametrize(("variables", "said"), [
    ({"HOROVOD_RANK": "0"}, ""), ({"OMPI_COMM_WORLD_RANK": "0"}, ""), ({"PMIX_RANK": "0"}, ""), ({}, "alive\n")])
def test_a_worker_ends_with_its_launcher_and_otherwise_outlives_its_parent(variables, said):
    """The parent ends by SIGKILL, which leaves it no time to end the worker."""
    others = {name: value for name, value in environment().items() if not name.startswith(LAUNCHERS)}
    with subprocess.Popen([sys.executable, "-c", PARENT, WORKER], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                          env=others | variables) as parent:
        assert parent.stdout.readline() == "under way\n"
        parent.kill()
        assert parent.stdout.read() == said  # up to the end of the worker
