"""The lock on a run's folder, between processes. A process that names another host in the lock's file stands for one
there: a second host with a network file system cannot be here.
"""
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
from conftest import ROOT

from common import files, locks
from common.errors import UserError
from plan import output_dir

LOCKS = """
import sys
from pathlib import Path
from plan import output_dir
with output_dir.locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""
ELSEWHERE = """
import fcntl, sys
with open(sys.argv[1] + "/.lock", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(sys.argv[2])
    file.flush()
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def process(program, *arguments, **variables):
    with subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], cwd=ROOT, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=os.environ | variables) as one:
        yield one
        one.kill()


def test_the_lock_of_a_lost_host_is_waited_for(tmp_path):
    lost = {"host": "node7", "pid": 12, "job": "34", "start": "0"}
    with process(ELSEWHERE, tmp_path, json.dumps(lost)) as holder:
        assert holder.stdout.readline() == "locked\n"
        with process(LOCKS, tmp_path, SLURM_JOB_ID="34", SLURM_RESTART_COUNT="1") as requeued:
            named = f"another training run (process 12 on node7, Slurm job 34) holds the lock on {tmp_path}; waiting"
            assert named in requeued.stderr.readline()
            holder.send_signal(signal.SIGKILL)
            assert requeued.stdout.readline() == "locked\n"
            ours = {"host": socket.gethostname(), "pid": requeued.pid, "job": "34", "start": "1"}
            assert json.loads((tmp_path / ".lock").read_text()) == ours


def test_a_training_that_lives_on_another_host_is_an_error_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(output_dir, "LEASE", 0)
    lives = {"host": "node7", "pid": 12, "job": "", "start": "0"}
    with process(ELSEWHERE, tmp_path, json.dumps(lives)) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=r"another training run \(process 12 on node7\) writes to"), \
                output_dir.locked(tmp_path):
            pass


def test_a_training_that_lives_on_this_host_is_an_error_at_once(tmp_path, capsys):
    with process(LOCKS, tmp_path, SLURM_JOB_ID="34") as holder:
        assert holder.stdout.readline() == "locked\n"
        named = rf"\(process {holder.pid} on {socket.gethostname()}, Slurm job 34\)"
        with pytest.raises(UserError, match=named), output_dir.locked(tmp_path):
            pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("job, start, may_be", [("34", "0", True), ("34", "1", False), ("35", "0", False),
                                                ("", "0", False)])
def test_a_process_of_this_host_may_be_an_earlier_start_of_this_job(job, start, may_be, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "34")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert locks.Holder(socket.gethostname(), 12, job, start).may_be_lost() == may_be


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_line(number, tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(files, "NAMED", set())
    with output_dir.locked(tmp_path):
        assert (tmp_path / ".lock").read_bytes() == b""
    assert f"warning: the file system of {tmp_path}/.lock has no locks" in capsys.readouterr().err
