"""Elastic training under horovodrun: a worker is killed, one joins; the recipe stays and every sample is read."""
import base64
import contextlib
import hmac
import http.client
import json
import os
import pickle
import socketserver
import struct
import subprocess
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT, TINY, environment, launcher, printed_json, rows, run, train, worker_of

from plan import flags
from tests.rigs.bn_train import PROGRAM
from tests.rigs.trainings import PATIENCE, differences, newest_step, wait_for
from training.run import Training
from training.state import Progress

FLAGS = ("--elastic", *TINY, "--batch_size=128", "--ema_decay=0.95", "--checkpoint_every=1")


class Elastic:
    """A training under an elastic horovodrun; hosts: names for this machine, one for each worker."""

    def __init__(self, folder, hosts, *flags):
        folder.mkdir(exist_ok=True)
        self.folder, self._hosts = folder / "run", folder / "hosts"
        self.offer(hosts)
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self._hosts}\n")
        script.chmod(0o755)
        self.log = folder / "log"
        *horovodrun, python = launcher("horovodrun", len(hosts))
        with open(self.log, "wb") as log:
            self.launcher = subprocess.Popen(
                [*horovodrun, "--network-interfaces", "lo", "--min-np", "1", "--max-np", str(max(2, len(hosts))),
                 "--host-discovery-script", script, python, PROGRAM, *FLAGS, *flags,
                 f"--output_dir={self.folder}"],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment())

    def offer(self, hosts):
        part = self._hosts.with_suffix(".part")
        part.write_text("".join(f"{host}:{hosts.count(host)}\n" for host in dict.fromkeys(hosts)))
        part.replace(self._hosts)

    def worker(self, rank):
        return worker_of(self._started("HOROVOD_RANK", str(rank)))

    def worker_on(self, host):
        """One of a host's; horovodrun may give ranks to either host first."""
        return worker_of(self._started("HOROVOD_HOSTNAME", host))

    def server(self):
        """The address and port at which horovodrun listens."""
        variables = self._started("HOROVOD_RANK", "0").environ()
        return f"{variables['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{variables['HOROVOD_GLOO_RENDEZVOUS_PORT']}"

    def _started(self, variable, value):
        for process in psutil.Process(self.launcher.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # one that has just ended
                with_python = process.name().startswith("python") and str(PROGRAM) in process.cmdline()
                if with_python and process.environ().get(variable) == value:
                    return process
        raise AssertionError(f"no worker with {variable}={value}")

    def reach(self, step):
        wait_for(lambda: newest_step(self.folder) >= step, self.launcher)

    def exit_code(self):
        return self.launcher.wait(PATIENCE)

    def end(self):
        assert self.exit_code() == 0, self.log.read_text()[-3000:]
        return json.loads((self.folder / "summary.json").read_text()), self.log.read_text()


@pytest.mark.launchers
def test_a_worker_joins_and_rank_0_is_lost(tmp_path):
    """The workers of 127.0.0.1 that two tests below kill have other ranks."""
    training = Elastic(tmp_path, ["localhost"], "--epochs=10000")
    training.reach(12)
    training.offer(["localhost", "127.0.0.1"])
    wait_for(lambda: "on 2 workers instead of 1" in training.log.read_text(), training.launcher)
    training.reach(newest_step(training.folder) + 30)
    training.worker(0).kill()
    reached = newest_step(training.folder)
    wait_for(lambda: "on 1 worker instead of 2" in training.log.read_text(), training.launcher)
    step = int(training.log.read_text().split("resumed after step ")[-1].split()[0])
    assert step >= reached - 10  # at most the steps since the last commit
    training.reach(step + 30)
    plan = json.loads((training.folder / "plan.json").read_text())
    assert plan["workers"] == 1 and plan["phases"][0]["accumulation_steps"] == 2  # 64 a time, as before
    training.worker(1).terminate()  # its rank when it started
    assert training.exit_code() == 1  # horovodrun's own, whatever a worker's
    assert training.log.read_text().count("stopped on request") == 1
    found = rows(training.folder)
    assert [row["epoch"] for row in found] == list(range(1, len(found) + 1)) and len(found) > 3
    for row in found:
        assert row["samples"] == -(-row["epoch"] * 1437 // 128) * 128 <= newest_step(training.folder) * 128


@pytest.mark.campaign
def test_a_worker_that_is_lost_after_a_rollback_does_not_undo_it(tmp_path):
    training = Elastic(tmp_path, ["localhost", "127.0.0.1"], "--epochs=6", "--learning_rate=0:0.02,1.5:1e12",
                       "--on_divergence=rollback", "--max_rollbacks=1", "--observer=tests.rigs.losing:Losing")
    assert training.exit_code() == 1
    log = training.log.read_text()
    assert log.count("rolled back to") == 1 and ", after 1 rollbacks" in log, log[-3000:]
    assert "on 1 worker instead of 2" in log


def test_a_rollback_outranks_the_steps_before_it(tmp_path):
    """A worker was lost while all committed a rollback: one has committed it, another not yet, and a third is new."""
    training = Training(flags.parse(["train.py", f"--output_dir={tmp_path}"]), None, None, None, None, None)
    training._recovery = SimpleNamespace(committed=SimpleNamespace(progress=Progress(step=12, rollbacks=1)))

    def root_among(others_and) -> int | None:
        world = SimpleNamespace(gather=lambda mine, name: others_and(mine))
        state = SimpleNamespace(model=SimpleNamespace(name="convnet"))
        return training._agree_on_start(SimpleNamespace(world=world, state=state), None)[0]

    assert root_among(lambda mine: [((0, 20), tmp_path, "h1"), mine, ((0, -1), tmp_path, "h3")]) == 1
    training._recovery = None
    assert root_among(lambda mine: [mine]) is None


@pytest.mark.launchers
def test_a_torus_that_loses_a_worker_gets_another_grid(tmp_path):
    """Horovod gives up the whole host of the worker that is lost: of 3x2 there are four left."""
    training = Elastic(tmp_path, ["localhost"] * 4 + ["127.0.0.1"] * 2, "--epochs=200", "--batch_size=144",
                       "--allreduce=torus", "--torus_grid=3x2", "--compression=fp16", "--batch_norm_span=auto")
    training.reach(12)
    before = json.loads((training.folder / "plan.json").read_text())
    assert before["workers"] == 6 and before["exchange"]["grid"] == [3, 2]
    training.worker_on("127.0.0.1").kill()
    wait_for(lambda: "on 4 workers instead of 6" in training.log.read_text(), training.launcher)
    training.reach(newest_step(training.folder) + 30)
    after, log = json.loads((training.folder / "plan.json").read_text()), training.log.read_text()
    assert after["workers"] == 4 and after["exchange"]["allreduce"] == "torus" and after["exchange"]["grid"] == [2, 2]
    assert log.count("note: 3x2 does not fit 4 workers; ") == 1 and "goes on as with --torus_grid=auto" in log
    training.worker_on("localhost").terminate()
    assert training.exit_code() == 1 and training.log.read_text().count("stopped on request") == 1


UNEVEN = ("--micro_batch_size=32", "--model=bn_convnet", "--image_size=16", "--deterministic",
          "--log_trust_ratios")


@pytest.mark.launchers
def test_workers_that_do_not_divide_the_batch_have_its_mean(tmp_path):
    """Three workers share four micro-batches, and make the bits of one worker that has them all."""
    training = Elastic(tmp_path, ["localhost"] * 3, "--epochs=1", *UNEVEN)
    summary, _ = training.end()
    phase, = json.loads((training.folder / "plan.json").read_text())["phases"]
    assert summary["world_size"] == 3 and (phase["micro_batch_size"], phase["accumulation_steps"]) == (32, 2)
    evaluated = train("--mode=evaluate", f"--checkpoint={training.folder}/checkpoints", program=PROGRAM)  # alone
    assert printed_json(evaluated)["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-3)
    alone = tmp_path / "alone"
    train(*FLAGS[1:], *UNEVEN, "--epochs=1", f"--output_dir={alone}", program=PROGRAM)
    assert differences(training.folder, alone) == []
    ours, theirs = (rows(folder, "steps.jsonl") for folder in (training.folder, alone))
    assert len(ours) == len(theirs) == 11
    assert [(one["loss"], one["top1"]) for one in ours] == [(one["loss"], one["top1"]) for one in theirs]
    compressed = Elastic(tmp_path / "compressed", ["localhost"] * 3, "--epochs=1", *UNEVEN, "--compression=fp16",
                         "--allreduce=torus", "--torus_grid=3x1")
    compressed.end()
    assert [row["loss"] for row in rows(compressed.folder, "steps.jsonl")] == pytest.approx(
        [row["loss"] for row in theirs], rel=1e-3)


@pytest.mark.launchers
def test_a_worker_is_lost_and_the_rest_do_not_divide_the_batch(tmp_path):
    """All notice at once. The result has the bits of one worker alone."""
    training = Elastic(tmp_path, ["localhost"] * 3 + ["127.0.0.1"], "--epochs=5", *UNEVEN, "--model=convnet")
    training.reach(22)
    training.worker_on("127.0.0.1").kill()
    summary, log = training.end()
    assert summary["world_size"] == 3 and "on 3 workers instead of 4" in log
    assert "has not answered" not in log  # one that waits for workers that have shut down notices
    assert [row["samples"] for row in rows(training.folder)] == [
        -(-epoch * 1437 // 128) * 128 for epoch in range(1, 5)] + [5 * 1437 // 128 * 128]
    train(*FLAGS[1:], *UNEVEN, "--model=convnet", "--epochs=5", f"--output_dir={tmp_path}/alone", program=PROGRAM)
    assert differences(training.folder, tmp_path / "alone") == []


@pytest.mark.campaign
def test_a_lost_worker_takes_no_other_one_with_it():
    """Each of the others gets Horovod's error at once in all of 40 kills. Gloo's time-out is 30 s."""
    codes, seconds = zip(*json.loads(run("python", 1, "-m", "tests.rigs.killing", 40).stdout), strict=True)
    assert codes == ([0, 0, 0],) * 40 and max(seconds) < 10


@pytest.mark.launchers
def test_more_workers_than_micro_batches_are_an_error(tmp_path):
    training = Elastic(tmp_path, ["localhost"], "--epochs=400", "--batch_size=64", "--micro_batch_size=64")
    training.reach(12)
    training.offer(["localhost", "127.0.0.1"])
    assert training.exit_code() != 0
    assert "64 is not divisible by 2 workers x --micro_batch_size=64" in training.log.read_text()


def test_horovodrun_without_the_flag_is_an_error():
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        done = run("python", 1, ROOT / "train.py", "--epochs=1")
    finally:
        del os.environ["HOROVOD_ELASTIC"]
    assert done.returncode == 2 and "add --elastic" in done.stderr


class Exploit:
    """An object whose pickle creates a file where it is loaded."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def answers(response: bytes, key: bytes, probed: threading.Event) -> socketserver.TCPServer:
    """A server on this machine that answers whoever asks it with a pickle signed with the key, as Horovod's do."""
    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.read(1)
            probed.set()
            self.wfile.write(hmac.digest(key, response, "sha256") + struct.pack("i", len(response)) + response)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def seen_by_others() -> str:
    """What another user of this machine can read about its processes."""
    done = subprocess.run(["sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ"], user=65534, group=65534,
                          extra_groups=[], capture_output=True, cwd="/")
    return done.stdout.decode(errors="replace")


def put(where, value) -> int:
    request = urllib.request.Request(f"http://{where}", data=base64.b64encode(pickle.dumps(value)), method="PUT")
    try:
        return urllib.request.urlopen(request, timeout=300).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.launchers
def test_who_reaches_the_ports_of_elastic_training_cannot_run_code(tmp_path):
    """CVE-2024-10190: horovodrun unpickles what anyone PUTs there, and what the addresses found in it answer."""
    training = Elastic(tmp_path, ["localhost"], "--epochs=10000")
    training.reach(12)
    server = training.server()
    address, token = server.split("/")
    if not os.geteuid():
        assert str(PROGRAM) in (seen := seen_by_others()) and token.partition(":")[0] not in seen
    assert put(f"{address}/worker_addresses/localhost:0", Exploit(tmp_path / "put")) == 403
    assert put(f"{server}/worker_addresses/localhost:0", Exploit(tmp_path / "put")) == 400
    key, probed = b"k" * 32, threading.Event()
    with answers(pickle.dumps(Exploit(tmp_path / "answered")), key, probed) as theirs:
        with contextlib.suppress(http.client.RemoteDisconnected):  # without a valid answer, it drops the request
            put(f"{server}/worker_addresses/localhost:9", ({"lo": [theirs.server_address]}, key))
        assert probed.wait(300)
        theirs.shutdown()
    with pytest.raises(urllib.error.HTTPError, match="404"):  # the key with which messages to a worker are signed
        urllib.request.urlopen(f"http://{server}/worker_addresses/localhost:0")
    assert not (tmp_path / "put").exists() and not (tmp_path / "answered").exists()
    listening = {connection.laddr.ip for process in (training.launcher.pid, training.worker(0).pid)
                 for connection in psutil.Process(process).net_connections("tcp") if connection.status == "LISTEN"}
    assert listening == {"127.0.0.1"}
    training.reach(newest_step(training.folder) + 20)
    training.worker(0).terminate()
    assert training.exit_code() == 1 and training.log.read_text().count("stopped on request") == 1

