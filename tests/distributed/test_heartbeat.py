"""A frozen worker is named and the job ends; a job that was frozen as a whole goes on. A worker that hangs is named."""
import json
import re
import signal
import socket
import time
from types import SimpleNamespace

import psutil
import pytest
from conftest import DIGITS, ROOT, TINY, run, start, trainers, worker_of
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed import heartbeat
from distributed.world import World
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
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not alive


ASYNCHRONOUS = f"""
import runpy, sys
from tensorflow.python.eager import context, executor
from distributed import heartbeat
from training import build

class Queued:
    def __init__(self, parts):
        self.step, self.queue = made(parts), executor.new_executor(True)
        self.get_concrete_function = self.step.get_concrete_function

    def __call__(self, *arguments):
        context.context().executor, before = self.queue, context.context().executor
        try:
            return self.step(*arguments)
        finally:
            context.context().executor = before

made, build.make_train_step, heartbeat.LIMIT = build.make_train_step, Queued, 5.0
sys.argv[0] = "{ROOT / 'train.py'}"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.launchers
@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_worker_is_named_where_the_host_waits_for_results_only(rank, tmp_path):
    """As on GPUs with HOROVOD_ENABLE_ASYNC_COMPLETION: steps are launched, and no exchange tells the host of an error.

    An asynchronous executor of TensorFlow stands for the GPU's queue. A worker that is stopped is as silent as one
    whose host is gone; a launcher would end the job at once if the process alone were.
    """
    (tmp_path / "asynchronous_train.py").write_text(ASYNCHRONOUS)
    launcher = start(tmp_path / "run", 2, (DIGITS, *TINY, "--epochs=1000", "--checkpoint_every=1"),
                     tmp_path / "asynchronous_train.py")
    wait_for(lambda: newest_step(tmp_path / "run") >= 12, launcher)
    workers = trainers(launcher)
    workers[rank].send_signal(signal.SIGSTOP)
    assert launcher.wait(300) == 1
    log = (tmp_path / "run.log").read_text()
    assert f"process {workers[rank].pid}) has not answered for 5 s; the job ends" in log
    _, alive = psutil.wait_procs(workers, timeout=300)
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
    """Datagrams of every kind at each rank's port: nobody is missed for them, and no thread ends."""
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
forged = json.dumps({"rank": 5, "host": "h", "pid": 1, "step": 9, "does": "computing", "seconds": 0.5}).encode()
for data in (b"", b"{}", b"[]", b"7", b"\\xff" * 100, b"[" * 2000, b"[" * 60000, forged,
             heartbeat.signed(b"guessed", forged), heartbeat.signed(beat._meeting.key, forged)[:-1]):
    sender.sendto(data, ("127.0.0.1", beat._socket.getsockname()[1]))
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


class Rank0:
    """Of a world of two workers."""

    rank, size = 0, 2

    def broadcast(self, value, name):
        return value


BEAT = json.dumps({"rank": 1, "host": "h", "pid": 7, "step": 9, "does": "computing", "seconds": 0.5}).encode()


@pytest.fixture
def rank_0():
    """Yields rank 0's heartbeat, and a function that sends it a datagram over a real socket."""
    beat = heartbeat.Heartbeat(Rank0(), pytest.fail)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        yield beat, lambda data: sender.sendto(data, ("127.0.0.1", beat._meeting.port))
    beat.stop()


def test_no_bytes_without_the_key_change_anything(rank_0, monkeypatch):
    """Neither noise, nor noise behind a genuine digest, nor a genuine datagram that was changed, cut or lengthened."""
    beat, send = rank_0
    genuine = heartbeat.signed(beat._meeting.key, BEAT)
    read = []
    monkeypatch.setattr(heartbeat, "json", SimpleNamespace(
        loads=lambda text: read.append(text) or json.loads(text), dumps=json.dumps))

    @given(st.binary(max_size=3000), st.integers(0, len(genuine) - 1), st.integers(1, 255))
    @settings(max_examples=300, deadline=None)
    def send_noise(noise, position, bits):
        changed = bytearray(genuine)
        changed[position] ^= bits
        for data in (noise, genuine[:32] + noise, bytes(changed), genuine[:position], genuine + noise + b" "):
            send(data)

    send_noise()
    send(b"[" * 2000)
    while not beat._heard:  # the socket drops datagrams when it is full
        send(genuine)
        time.sleep(0.01)
    assert {*read} == {BEAT} and [*beat._heard] == [1] and beat._thread.is_alive()


FAILING = """
import time
from common.threads import start_service
start_service("heartbeat", lambda: int("seven"))
time.sleep(600)
"""


def test_a_service_thread_that_fails_ends_the_process_with_a_line():
    done = run("python", 1, "-c", FAILING, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "the thread 'heartbeat' has failed, which ends this process: ValueError: invalid literal for int() with base "
        "10: 'seven'")


STALLING = f"""
import runpy, sys
from data.staging import spool
from distributed import heartbeat

heartbeat.STALLED, heartbeat.INTERVAL = 4.0, 0.1
spool.FIRST_FILE, spool.LARGEST_FILE, spool.AHEAD, spool.FIRST_SAMPLES = 4096, 16384, 32768, 8
sys.argv[0] = "{ROOT / 'train.py'}"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.launchers
def test_a_worker_whose_reader_hangs_is_named_once_and_training_goes_on(in_format, tmp_path):
    """The processes that copy its samples for DALI are stopped, twice."""
    (tmp_path / "stalling_train.py").write_text(STALLING)
    launcher = start(tmp_path / "run", 2, (DIGITS, *TINY, "--epochs=1000", "--checkpoint_every=1",
                                           f"--data_dir={in_format('lmdb')}"), tmp_path / "stalling_train.py")

    def named():
        return re.findall(r"no progress for 4 s at step (\d+): worker 1 \(\S+, process (\d+)\) is waiting for data\n",
                          (tmp_path / "run.log").read_text())

    for times in (1, 2):
        step = newest_step(tmp_path / "run")
        wait_for(lambda step=step: newest_step(tmp_path / "run") >= step + 12, launcher)
        [_, worker] = trainers(launcher)
        writers = [worker_of(process) for process in worker.children()
                   if "data.staging.spool_writer" in process.cmdline()]
        assert writers
        for writer in writers:
            writer.suspend()
        wait_for(lambda times=times: len(named()) == times, launcher)
        for writer in writers:
            writer.resume()
    step = newest_step(tmp_path / "run")
    wait_for(lambda: newest_step(tmp_path / "run") >= step + 12, launcher)
    launcher.terminate()
    launcher.wait(300)
    log = (tmp_path / "run.log").read_text()
    assert len(named()) == 2 and {int(process) for _, process in named()} == {worker.pid}, log[-3000:]
    _, _, trained = log.partition("start-up: ")  # a start that takes 4 s may be named, with both workers
    assert trained and "worker 0 (" not in trained and int(named()[0][0]) < int(named()[1][0])


def reports(*states) -> dict:
    """What rank 0 has heard: (what a worker does, for how many seconds), ..."""
    return {rank: heartbeat.Report(f"node{rank}", 10 + rank, 7, *state) for rank, state in enumerate(states)}


OTHERS, DATA = (heartbeat.OTHERS, 61.0), (heartbeat.DATA, 61.0)
COMPILES, EVALUATES = ("computing", 300.0), ("evaluating", 300.0)


@pytest.mark.parametrize(("states", "named"), [
    ([OTHERS, DATA, OTHERS], "worker 1 (node1, process 11) is waiting for data"),
    ([DATA], "worker 0 (node0, process 10) is waiting for data"),
    ([("computing", 70.0), DATA], "worker 1 (node1, process 11) is waiting for data"),
    ([OTHERS, OTHERS, ("computing", 70.0)], "worker 2 (node2, process 12) is computing"),
    ([("writing a checkpoint", 80.0), OTHERS], "worker 0 (node0, process 10) is writing a checkpoint"),
    ([OTHERS, OTHERS], f"worker 0 (node0, process 10) is {heartbeat.OTHERS}; worker 1 (node1, process 11) is "
                       f"{heartbeat.OTHERS}"),
    ([OTHERS] + [DATA] * 10, "; ".join(f"worker {rank} (node{rank}, process {10 + rank}) is waiting for data"
                                       for rank in range(1, 9)) + "; and 2 more workers"),
    ([COMPILES, COMPILES, COMPILES], None),
    ([EVALUATES, EVALUATES], None),
    ([OTHERS, ("computing", 59.0)], None),
    ([COMPILES, (heartbeat.OTHERS, 59.0)], None),
    ([(heartbeat.DATA, 59.0), (heartbeat.DATA, 1.0)], None),
])
def test_who_is_named_after_a_minute(states, named, capsys):
    beat = heartbeat.Heartbeat(World())
    beat.stop()
    beat._size = len(states)
    for found in (reports(*states), reports(*states), reports(*[("computing", 0.0)] * len(states)), reports(*states)):
        beat._reports = found
        beat._name_stalled()
    expected = f"bigbatch: no progress for 60 s at step 7: {named}\n"
    assert capsys.readouterr().err == (2 * expected if named else "")
