"""Forks (rigs/warm.py) against a Python that starts cold: where they run, what they find, how they end."""
import re
import signal
import subprocess
import time

import pytest
from conftest import BIN, DIGITS, ROOT, environment, run, start, train, unshare, warm_python, worker_of

from tests.rigs import warm
from tests.rigs.trainings import differences, newest_step, trainers, wait_for

SMALLEST = (DIGITS, "--model=convnet", "--image_size=8", "--augmentation=none", "--batch_size=96", "--optimizer=sgd",
            "--learning_rate=0.02", "--warmup=none")
ENDS = {
    "a text": "import sys; sys.exit('wrong')",
    "more than a byte": "import sys; sys.exit(258)",
    "an error": "1 / 0",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "a thread, and functions at the end": "import atexit, threading; atexit.register(print, 'end')\n"
                                          "threading.Timer(0.2, print, ['thread']).start(); print('main')",
    "output in a buffer of C": "import ctypes; c = ctypes.CDLL(None); stdout = ctypes.c_void_p.in_dll(c, 'stdout')\n"
                               "c.setvbuf(stdout, None, 0, 4096); c.puts(b'text')",
}
# The name of the host, and the number of each namespace.
WHERE = ("import os, socket, sys; print(socket.gethostname(), "
         "*(os.stat(f'/proc/self/ns/{kind}').st_ino for kind in sys.argv[1:]))")
WAITING = ("import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7)); open(sys.argv[1], 'w'); "
           "signal.pause()")
# Starts the code $1, which writes the file $2, sends it a signal, and waits until neither it nor a fork is left.
SIGNALLED = """
for number in USR1 KILL; do
    $0 -c "$1" "$2" & until [ -e "$2" ]; do sleep 0.05; done; rm "$2"
    kill -$number $!; wait $! || echo $?
    while pgrep -f 'rigs/[w]arm.py' >/dev/null; do sleep 0.05; done
done
"""


def in_namespaces(script: str, *arguments) -> subprocess.CompletedProcess:
    """A shell script in namespaces of its own."""
    words = unshare("--uts", "--pid", "--ipc", "--net", "--mount", "--fork", "--kill-child", "--mount-proc")
    return subprocess.run([*words, "sh", "-c", script, *map(str, arguments)], text=True, capture_output=True,
                          timeout=300, env=environment(), cwd=ROOT)


@pytest.mark.parametrize("name", ENDS)
def test_a_fork_ends_as_python_does(name):
    fork, python = (run("python", 1, "-c", ENDS[name], cold=cold) for cold in (False, True))
    assert (fork.returncode, fork.stdout) == (python.returncode, python.stdout)
    assert fork.stderr.splitlines()[-1:] == python.stderr.splitlines()[-1:]


def test_a_fork_has_the_callers_place_for_temporary_files(tmp_path, monkeypatch):
    warm_python()  # whose server has found its own
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert run("python", 1, "-c", "import tempfile; print(tempfile.gettempdir())").stdout == f"{tmp_path}\n"


def test_a_fork_leaves_mpi():
    """mpirun fails if a worker has not."""
    done = run("mpirun", 2, "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["2", "2"], "")


def test_a_fork_is_where_its_caller_is():
    script = f'hostname inner; {warm_python()} -c "$0" "$@"; "{BIN}/python" -c "$0" "$@"'
    done = in_namespaces(script, WHERE, *warm.NAMESPACES)
    fork, python = done.stdout.splitlines()
    assert fork == python and fork.startswith("inner ")
    outside = run("python", 1, "-c", WHERE, *warm.NAMESPACES[1:]).stdout.split()
    assert not set(fork.split()) & set(outside)


def test_signals_reach_a_fork_among_other_processes(tmp_path):
    ready = str(tmp_path / "ready")
    done = in_namespaces(SIGNALLED, warm_python(), WAITING, ready)
    assert done.stdout.split() == ["7", str(128 + signal.SIGKILL)], done.stderr


def test_other_programs_import_what_is_theirs(tmp_path):
    """The checkout's modules wait for its own train.py alone."""
    names = f"sorted({{name.partition('.')[0] for name in sys.modules}} & {{*{warm.ROOMS}}})"
    assert run("python", 1, "-c", f"import sys; print({names})").stdout == "[]\n"
    (tmp_path / "common.py").touch()
    (tmp_path / "train.py").write_text(f"import common, sys; print(common.__file__, {names})")
    assert run("python", 1, tmp_path / "train.py").stdout == f"{tmp_path}/common.py ['common']\n"


def test_what_a_fork_starts_is_a_fork():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(sys.modules.keys())'])"
    assert "'tensorflow'" in run("python", 1, "-c", program).stdout


@pytest.mark.trainings
def test_a_fork_trains_the_same_weights(tmp_path):
    """To the bit. Its clock starts with it, and not with the server."""
    flags = (*SMALLEST, "--deterministic", "--epochs=0.5")
    run("python", 1, "-c", "")  # the server has started now
    train(*flags, f"--output_dir={tmp_path / 'python'}", cold=True)
    began = time.monotonic()
    with subprocess.Popen([warm_python(), ROOT / "train.py", *flags, f"--output_dir={tmp_path / 'fork'}"], text=True,
                          env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        [seconds] = next(filter(None, (re.findall(r"^start-up: ([\d.]+) s", line) for line in process.stderr)))
        assert float(seconds) - 0.05 <= time.monotonic() - began  # it is rounded
        process.stderr.read()
    assert process.returncode == 0 and differences(tmp_path / "python", tmp_path / "fork") == []


def test_a_fork_ends_with_what_stands_for_it(tmp_path):
    launcher = start(tmp_path / "run", 1, (*SMALLEST, "--epochs=1000", "--checkpoint_every=1"))
    wait_for(lambda: newest_step(tmp_path / "run") > 0, launcher)
    [caller] = trainers(launcher)
    fork = worker_of(caller)
    caller.kill()
    assert launcher.wait(300) == 128 + signal.SIGKILL
    fork.wait(300)


@pytest.mark.campaign
@pytest.mark.parametrize("kind, workers, flags, code", [
    ("python", 1, ("--optimizer=adagrad",), 2), ("mpirun", 2, (*SMALLEST, "--epochs=0.2"), 0),
    ("horovodrun", 2, (*SMALLEST, "--epochs=0.2"), 0)])
def test_a_hundred_forks_end(kind, workers, flags, code, tmp_path):
    """None hangs."""
    for number in range(100):
        done = run(kind, workers, ROOT / "train.py", *flags, f"--output_dir={tmp_path / str(number)}", timeout=200)
        assert done.returncode == code, (number, done.stderr[-2000:])
