"""Tests that need root by themselves, run as an ordinary user: they pass in a user namespace, or say why not."""
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, require_tool, unshare

TESTS = ("tests/launch/test_env.py::test_dockers_bridge_is_left_out",  # a network of its own
         "tests/test_warm.py::test_a_fork_is_where_its_caller_is",
         "tests/data/test_prepare.py::test_a_full_disk_and_room_made[tfrecord]",  # mounts
         "tests/distributed/test_step_messages.py::test_a_step_sends_one_message_besides_the_gradients[4x1]",  # sshd
         "tests/launch/test_slurm.py::test_an_array_trains_a_run_of_a_sweep_each")


@pytest.mark.launchers
def test_what_needs_root_passes_or_says_so(tmp_path):
    """For a user who may make user namespaces and has one number in them, as without /etc/subuid."""
    require_tool("ip")
    unshare("--user")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BIGBATCH", "PYTEST"))}
    done = subprocess.run(["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-m", "pytest",
                           "-n0", "-m", "", "-rs", "-pno:cacheprovider", f"--basetemp={tmp_path / 'made'}", *TESTS],
                          cwd=ROOT, text=True, capture_output=True, timeout=300, env=kept)
    assert done.returncode == 0 and "3 passed, 2 skipped" in done.stdout, done.stdout[-4000:]
    assert len(re.findall(r"^SKIPPED.*needs ", done.stdout, re.MULTILINE)) == 2
