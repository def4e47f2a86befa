"""launch/horovodrun.sh over real ssh, on several hosts that one machine plays."""
import contextlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
import uuid

import psutil
import pytest
from conftest import BIN, ROOT, TINY, emulated_hosts, rows, scripts_environment

from common.errors import UserError
from launch import hosts as host_lists
from plan.recipes import recipe_path
from tests.rigs.gpus import gpu, pretend
from tests.rigs.hosts import WORKER
from tests.rigs.telling import SET
from tests.rigs.trainings import wait_for

pytestmark = pytest.mark.launchers

SCRIPT = ROOT / "launch" / "horovodrun.sh"
COLD = ("env", "-u", "BIGBATCH_PYTHON", SCRIPT)  # starts Python as it is, instead of forks
BOTH = ("-H", "h1:1,h2:1")
QUICK = ("digits", *TINY, "--epochs=2")
LONG = (*QUICK, "--epochs=500", "--checkpoint_every=0.5")


@pytest.fixture(scope="module")
def hosts():
    with emulated_hosts("h1", "h2") as hosts:
        yield hosts


@pytest.fixture
def left(hosts):
    """Asserts at a test's end that nothing is left running."""
    yield hosts.trainers
    deadline = time.monotonic() + 300
    while hosts.trainers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert hosts.trainers() == []


def launch(hosts, *arguments, script=(SCRIPT,)):
    """A finished launch from the login node."""
    return hosts.run("login", *script, *arguments)


def started(hosts, folder, *arguments, script=(SCRIPT,)) -> subprocess.Popen:
    """A launch whose training has written a checkpoint on h1."""
    process = subprocess.Popen(hosts.words("login", *script, *arguments, f"--output_dir={folder}"), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list((hosts.top / "h1").glob(f"{folder}/checkpoints/step-*[0-9]")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    return process


def signalled(hosts, host, number) -> None:
    """Sends a signal to train.py's worker on a host."""
    hosts.run(host, "pkill", f"-{number}", "-f", WORKER).check_returncode()


def test_two_hosts_train_after_a_check(hosts, left):
    """Cold, because a fork would not show a crash at Python's end."""
    done = launch(hosts, *BOTH, *QUICK, "--output_dir=trained", script=COLD)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 2  # standard output carries it alone
    lines = done.stderr.splitlines()
    table = [line.split() for line in lines if line.startswith(("host ", "h1 ", "h2 "))]
    assert [row[0] for row in table] == ["host", "h1", "h2"]
    assert all(float(row[-1]) > 0 for row in table[1:])  # GB/s between the hosts
    assert "not shared*" in done.stderr and "same first host" in done.stderr  # no folder in common here
    assert any(line.startswith("epoch 2/2") for line in lines)
    assert len(rows(hosts.top / "h1" / "trained")) == 2 and not (hosts.top / "h2" / "trained").exists()


def test_a_stop_on_one_host_is_75_and_the_same_command_goes_on(hosts, left):
    command = ("--no-preflight", *BOTH, *QUICK, "--epochs=12", "--checkpoint_every=0.5")
    process = started(hosts, "stopped", *command)
    signalled(hosts, "h2", "USR1")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert err.count("train.py: stopped on request") == 1 and "\ntrain.py: stopped on request" in err  # rank 0's
    done = launch(hosts, *command, "--output_dir=stopped")
    assert done.returncode == 0 and "resumed after step" in done.stderr
    assert [row["epoch"] for row in rows(hosts.top / "h1" / "stopped")] == list(range(1, 13))


def test_a_killed_worker_ends_the_others_and_is_named(hosts, left):
    process = started(hosts, "killed", "--no-preflight", *BOTH, *LONG)
    signalled(hosts, "h2", "KILL")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "horovodrun.sh: worker 1 was killed, or its host was lost (exit code 255)\n" in err  # ssh's
    assert "training stopped" not in err and "Traceback" not in err
    report = json.loads((hosts.top / "h1" / "killed" / "run.json").read_text())
    assert report["stopped"].startswith("another worker has stopped; its own message says why")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopping_the_launcher_kills_every_worker(hosts, left, number):
    """Cold, because what ends a worker is the end of its parent, which is not a fork's launcher."""
    process = started(hosts, f"stop-{number}", "--no-preflight", *BOTH, *LONG, script=COLD)
    assert len(left()) >= 2
    hosts.run("login", "pkill", f"-{int(number)}", "-f", "launch.horovodrun").check_returncode()
    process.communicate(timeout=300)
    if number == signal.SIGINT:
        assert process.returncode == 130


def test_a_pulled_cable_is_named(hosts):
    process = started(hosts, "cable", "--no-preflight", *BOTH, *LONG)
    hosts.pull_cable("h2")
    _, err = process.communicate(timeout=180)
    hosts.plug_cable("h2")
    assert process.returncode == 1
    assert "worker 1 (h2, process " in err and "has not answered for 20 s" in err
    deadline = time.monotonic() + 300  # h2's worker misses rank 0 as long
    while hosts.trainers():
        assert time.monotonic() < deadline, hosts.trainers()
        time.sleep(0.5)


@pytest.mark.parametrize("where, message", [
    ("h1:1,nowhere:1", "nowhere: this host name is unknown"),
    ("h1:1,gone:1", "gone: cannot be reached by ssh"),  # a name whose host is down
])
def test_a_host_that_is_not_there(hosts, left, where, message):
    done = launch(hosts, "-H", where, *QUICK)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_a_wait_for_a_host_names_it_and_ends_on_request(hosts):
    process = subprocess.Popen(hosts.words("login", SCRIPT, "--wait", "-H", "h1:1,gone:1", *QUICK), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stderr.readline().startswith("horovodrun.sh: waiting for gone: cannot be reached by ssh")
    hosts.run("login", "pkill", "-TERM", "-f", r"python -m launch\.horovodrun").check_returncode()
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (75, "", "horovodrun.sh: stopped on request\n")


def test_unequal_versions(hosts, left, tmp_path):
    [metadata] = (BIN.parent / "lib").glob("python*/site-packages/horovod-0.28.1.dist-info/METADATA")
    (tmp_path / "METADATA").write_text(metadata.read_text().replace("Version: 0.28.1", "Version: 0.27.0"))
    hosts.cover("h2", metadata, tmp_path / "METADATA")
    done = launch(hosts, *BOTH, *QUICK)
    hosts.uncover("h2", metadata)
    assert done.returncode == 1
    assert "0.27.0*" in done.stderr or "0.28.1*" in done.stderr
    assert "Horovod is 0.2" in done.stderr and "run 'uv sync' there" in done.stderr


def test_a_clock_that_is_off(hosts, left, tmp_path):
    """Linux has one clock for all hosts here, so Python's is moved on one of them. Cold: forks read no .pth files."""
    [startup] = (BIN.parent / "lib").glob("python*/site-packages/distutils-precedence.pth")
    (tmp_path / "later.pth").write_text("import time; time.time = lambda now=time.clock_gettime: now(0) + 3\n")
    hosts.cover("h2", startup, tmp_path / "later.pth")
    done = launch(hosts, *BOTH, *QUICK, script=COLD)
    hosts.uncover("h2", startup)
    assert done.returncode == 1 and "+3.0*" in done.stderr
    assert "h2: the clock differs by +3.0 s from that of h1; synchronize both" in done.stderr


def test_a_host_without_the_data(hosts, left, digits):
    shutil.copytree(digits, hosts.top / "h1" / "data")
    done = launch(hosts, *BOTH, *QUICK, "--data_dir=data")
    assert done.returncode == 1
    assert f"h2: there is no dataset in {hosts.work}/data" in done.stderr and "missing" in done.stderr
    shutil.copytree(digits, hosts.top / "h2" / "data")
    described = json.loads((digits / "dataset.json").read_text())
    described["image"]["mean"][0] += 1
    (hosts.top / "h2" / "data" / "dataset.json").write_text(json.dumps(described))
    done = launch(hosts, *BOTH, *QUICK, "--data_dir=data")
    assert done.returncode == 1 and "--data_dir must point to the same dataset" in done.stderr


def test_fewer_gpus_than_workers(hosts, left, tmp_path):
    for host, gpus in (("h1", 2), ("h2", 1)):
        (tmp_path / host).mkdir()
        pretend(tmp_path / host, [gpu(number) for number in range(gpus)])  # the one thing that cannot be had here
        hosts.cover(host, "/usr/local/bin", tmp_path / host)
    done = launch(hosts, "-H", "h1:2,h2:2", *QUICK)
    for host in ("h1", "h2"):
        hosts.uncover(host, "/usr/local/bin")
    assert done.returncode == 1
    assert "h2: 1 GPUs for 2 workers; start 1 there" in done.stderr and "h1: 2 GPUs" not in done.stderr


def test_a_host_without_the_working_folder(hosts, left):
    done = subprocess.run([*hosts.words("login", "sh", "-c", f"mkdir here && cd here && {SCRIPT} -H h1:1 digits")],
                          text=True, capture_output=True, timeout=300)
    assert done.returncode == 1 and f"h1: the folder {hosts.work}/here does not exist" in done.stderr


@pytest.mark.parametrize("words", [("--dry-run", "digits", "--batch_size=256"),
                                   ("digits", "--batch_size=256", "--dry_run"),
                                   ("--dry_run", "digits", "--batch_size=256", "--dry-run")])
def test_dry_run_prints_the_plan_and_the_command(words):
    done = subprocess.run([SCRIPT, "-H", "a:8,b:8", *words], text=True, capture_output=True, timeout=300,
                          env=scripts_environment())
    assert json.loads(done.stdout)["workers"] == 16
    shown, hint = done.stderr.splitlines()
    words = shown.split()
    assert words[0].endswith("/python") and words[1:9] == ["-m", "distributed.gloo", "--gloo", "--disable-cache", "-np",
                                                           "16", "-H", "a:8,b:8"]
    assert words[-3:] == [str(ROOT / "train.py"), f"--flagfile={ROOT}/recipes/digits.flags", "--batch_size=256"]
    assert hint.startswith("warning: --batch_size=256: ")


def test_a_papers_exchange_comes_with_its_recipe():
    done = subprocess.run([SCRIPT, "-H", "a:8,b:8", "--dry-run", "sony_1811.05233/table3-reference"], text=True,
                          capture_output=True, timeout=300, env=scripts_environment())
    assert json.loads(done.stdout)["exchange"]["allreduce"] == "torus"
    assert "table3-reference.launch adds --allreduce=torus --compression=fp16 --loss_scale=128" in done.stderr


@pytest.mark.parametrize("arguments, code, message", [
    (["--hostfile"], 2, "--hostfile"),
    (["-H", "a:x", "digits"], 2, "'a:x' is not a host"),
    (["-H", "a:1,a:2", "digits"], 1, "host a is listed twice"),
    (["-H", "a:2", "-np", "3", "digits"], 2, "give a number from 1 to 2"),
    (["-H", "a:2", "no-such"], 2, "there is no recipe no-such"),
    (["-H", "a:2"], 2, "the recipe is missing"),
    (["--workers=4", "digits"], 2, "the number of workers is -np"),
    (["-np", "x", "digits"], 2, "-np=x"),
    (["--wait=soon", "digits"], 2, "--wait=soon"),
    (["--no-prefligt", "digits"], 2, "did you mean --no_preflight?"),
    (["--epochs=3", "digits"], 2, "put the flags of train.py after the recipe"),
    (["-H", "a:2", "--hostfile", "/nowhere", "digits"], 2, "remove one of them"),
    (["digits", "--worker=4"], 2, "'worker'"),
    (["-H", "", "digits"], 2, "'' is not a host"),
    (["digits", "--output_dir=s3://bucket/run"], 2, "nothing can be written to an address"),
    (["-H", "a:2", "digits", "--optimizer=adagrad"], 2, "optimizer"),
    (["--hostfile", "/nowhere", "digits"], 1, "/nowhere cannot be read"),
])
def test_wrong_arguments_are_one_line(arguments, code, message):
    done = subprocess.run([SCRIPT, *arguments], text=True, capture_output=True, timeout=300,
                          env=scripts_environment())
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), done.stderr
    assert message in done.stderr and done.stdout == ""


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_host_file(mark, tmp_path):
    """Also with the byte order mark of Windows' editors, and with hosts as -H has them."""
    path = tmp_path / "hosts"
    path.write_text(f"{mark}h1 slots=8\n# the rack\n\nh2 slots=4  # half of it\nh3\nh4:2\nfd00::1\n")
    assert host_lists.read(str(path)) == [host_lists.Host(name, slots) for name, slots in (
        ("h1", 8), ("h2", 4), ("h3", 1), ("h4", 2), ("fd00::1", 1))]
    for line, wrong in (("h1 slot=8", "h1 slot=8"), ("h1:2 slots=8", "h1:2:8"), ("h1:two", "h1:two")):
        path.write_text(f"{line}\n")
        with pytest.raises(UserError, match=f"'{wrong}'"):
            host_lists.read(str(path))


def test_recipes_are_found_by_path_and_by_name(tmp_path):
    own = tmp_path / "own.flags"
    own.write_text("--epochs=1\n")
    assert recipe_path(str(own)) == own
    assert recipe_path("sony_1811.05233/table3-experiment4").is_file()


@contextlib.contextmanager
def command_lines():
    """Yields a set that holds, at the end, the command lines that were seen of processes on all hosts."""
    seen, is_over = set(), threading.Event()

    def watch():
        while not is_over.wait(0.1):
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    seen.add(shlex.join(process.cmdline()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield seen
    is_over.set()
    watcher.join()


@pytest.mark.parametrize("where, workers", [(BOTH, 2), (("-H", "localhost:1"), 1)])
def test_credentials_reach_the_workers_and_no_list_of_processes(hosts, left, where, workers):
    """Nor does the job's key, with which Horovod signs its messages (`task_fn`).

    Cold: of a fork, the launcher finds no process to ask, and has to kill what is not its child.
    """
    secret = f"a secret: '{uuid.uuid4().hex}' $HOME \\ \"`id`\"\nof two lines"
    (hosts.top / "login" / "secret").write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in (
        ("AWS_SECRET_ACCESS_KEY", secret), *SET.items())))
    folder = f"run-{uuid.uuid4().hex}"
    process = subprocess.Popen(
        hosts.words("login", "sh", "-c", '. ./secret && exec "$@"', "sh", *COLD, "--no-preflight", *where,
                    *LONG, f"--output_dir={folder}"), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with command_lines() as seen:
        wait_for(lambda: list(hosts.top.glob(f"*/{folder}/checkpoints/step-*[0-9]")), process)
        environments = [process.environ() for process in psutil.process_iter(["cmdline"])
                        if re.match(f"{WORKER}.*{folder}", shlex.join(process.info["cmdline"] or []))]
        hosts.run("login", "pkill", "-TERM", "-f", r"python -m launch\.horovodrun").check_returncode()
        out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert [found["AWS_SECRET_ACCESS_KEY"] for found in environments if "HOROVOD_RANK" in found] == [secret] * workers
    told = [out, err, *seen, *(path.read_bytes().decode(errors="replace") for path in hosts.top.glob(f"*/{folder}/**/*")
                               if path.is_file())]
    assert all(found[name] == SET[name] for found in environments for name in SET if "HOROVOD_RANK" in found)
    [token] = {found["HOROVOD_GLOO_RENDEZVOUS_ADDR"].split("/")[1] for found in environments if "HOROVOD_RANK" in found}
    assert not any(word in text for text in told for word in (secret.split("'")[1], token))
    assert any("train.py" in line for line in seen) and not any("task_fn" in line for line in seen)


def test_the_interface_is_one_in_common_at_which_ssh_reached_the_hosts(monkeypatch):
    def interfaces(number, *names):
        return {"docker0": ["172.17.0.1"]} | {name: [f"10.{place}.0.{number}"] for place, name in enumerate(names)}

    monkeypatch.setattr(host_lists.facts, "interfaces", lambda: interfaces(9, "eth0", "ib0"))
    found = [{"host": f"h{number}", "interfaces": interfaces(number, "eth0", "ib0"), "ssh_address": f"10.1.0.{number}"}
             for number in (1, 2)]
    assert host_lists.common_interface(found) == "ib0"
    found[1]["interfaces"] = interfaces(2, "eth0")
    assert host_lists.common_interface(found) == "eth0"
    found[1]["interfaces"] = interfaces(2, "enp3s0")
    with pytest.raises(UserError, match="h2 has docker0, enp3s0"):
        host_lists.common_interface(found)
