"""A frozen worker is named and the job ends; a job that was frozen as a whole goes on."""
import signal

import psutil
import pytest
from conftest import run, start, trainers

from tests.rigs.trainings import newest_step, wait_for

FLAGS = ("--model=convnet", "--epochs=1000", "--checkpoint_every=1")


@pytest.mark.launchers
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_worker_is_named_and_the_job_ends(rank, tmp_path):
    launcher = start(tmp_path / "run", 2, FLAGS)
    wait_for(lambda: newest_step(tmp_path / "run") >= 12, launcher)
    workers = trainers(launcher)
    workers[rank].send_signal(signal.SIGSTOP)
    assert launcher.wait(180) == 1
    log = (tmp_path / "run.log").read_text()
    assert f"worker {rank} (" in log and f"process {workers[rank].pid}) has not answered for 20 s" in log
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


TOGETHER = """
import os, signal, subprocess, sys, time
import horovod.tensorflow as hvd
from distributed import heartbeat
from distributed.world import World
hvd.init()
heartbeat.LIMIT, heartbeat.INTERVAL = 3.0, 0.1
ended = []
beat = heartbeat.Heartbeat(World().renumbered(), ended.append)

def heard_since(moment):
    return ended or any(heard > moment for heard, *_ in list(beat._heard.values()))

def wait_for(condition):
    while not condition():
        time.sleep(0.01)

wait_for(lambda: heard_since(0))
hvd.allgather_object(None, name="begin")
if hvd.rank() == 0:  # a scheduler suspends the whole job, and lets it go on
    others = {others}
    subprocess.run(["sh", "-c", f"kill -STOP {{others}}; sleep 5; kill -CONT {{others}}"])
hvd.allgather_object(None, name="continued")
resumed = time.monotonic()
wait_for(lambda: heard_since(resumed))
hvd.allgather_object(None, name="end")
beat.stop()
print("ended" if ended else "alive")
"""


@pytest.mark.launchers
@pytest.mark.parametrize(("struck", "word"), [("all", "alive"), ("one", "ended")])
def test_a_job_that_was_suspended_as_a_whole_is_not_ended(struck, word):
    others = "' '.join(map(str, hvd.allgather_object(os.getpid(), name='pids')))"
    program = TOGETHER.format(others="pids" if struck == "all" else "pids.split()[1]").replace(
        "heartbeat.LIMIT", f"pids = {others}\nheartbeat.LIMIT")
    done = run("mpirun", 2, "-c", program)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split().count(word) >= 1
    if word == "alive":
        assert done.stdout.split() == ["alive", "alive"]


def test_what_is_not_ours_is_not_heard():
    """Datagrams of every kind at rank 0's port: nobody is missed for them."""
    program = """
import json, socket, time
import horovod.tensorflow as hvd
from distributed import heartbeat
from distributed.world import World
hvd.init()
heartbeat.LIMIT, heartbeat.INTERVAL = 2.0, 0.1
ended = []
beat = heartbeat.Heartbeat(World().renumbered(), ended.append)
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for data in (b"", b"{}", b"[]", b"7", b"\\xff" * 100, json.dumps({"word": "guessed", "rank": 5}).encode(),
             json.dumps({"word": beat._meeting.word}).encode()):
    sender.sendto(data, ("127.0.0.1", beat._meeting.port))
silent = time.monotonic() + heartbeat.LIMIT  # what was sent above has been silent for as long by then
while not ended and not any(heard > silent + heartbeat.INTERVAL for heard, *_ in list(beat._heard.values())):
    time.sleep(0.01)
print(len(ended), beat._thread.is_alive(), sorted(beat._heard) == [1 - hvd.rank()])
hvd.allgather_object(None, name="end")
beat.stop()
"""
    done = run("mpirun", 2, "-c", program)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["0 True True"] * 2
