"""launch/docker.sh; the Dockerfile is clean and builds; the image trains as any user, with no root and no network."""
import itertools
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT, printed_json, require_tool, rows

from tests.rigs import container
from tests.rigs.container import IMAGE, STORE, call

SCRIPT = ROOT / "launch" / "docker.sh"
SOMEBODY = 12345  # a user whom the image has never heard of
ANYBODY = f"--user={SOMEBODY}:{SOMEBODY}"
QUICK = ("--model=convnet", "--optimizer=sgd", "--learning_rate=0.02", "--warmup=none")


# --- the command that docker.sh makes ---

@pytest.fixture
def dry_run(tmp_path):
    """A function: the words of the command that docker.sh prints, on a machine with or without a GPU."""
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "env", "grep", "id", "realpath"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))

    def words(*arguments, gpu=False, spelled=("--dry-run",), **environment) -> list[str]:
        if gpu:
            (tmp_path / "bin" / "nvidia-smi").symlink_to("/bin/true")
        done = call("bash", SCRIPT, *spelled, *arguments, cwd=tmp_path,
                    env={"PATH": str(tmp_path / "bin"), **environment})
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return shlex.split(done.stdout)

    return words


def after(option: str, words: list[str]) -> list[str]:
    """The values that an option has, in alphabetical order."""
    return sorted(value for word, value in itertools.pairwise(words) if word == option)


def test_dry_run_shows_what_the_container_is_given(dry_run, tmp_path):
    words = dry_run(ROOT / "recipes/digits.flags", "--epochs=2", "--output_dir=mine")
    assert words[:3] == ["docker", "run", "--rm"] and "--ipc=host" in words and "--gpus" not in words
    assert after("--ulimit", words) == ["memlock=-1", "stack=67108864"]
    assert after("--user", words) == [f"{os.getuid()}:{os.getgid()}"]
    assert after("--mount", words) == [f"type=bind,source={tmp_path}/runs,target=/output"]
    assert words[-5:] == ["bigbatch", "launch/dgx1.sh", "recipes/digits.flags", "--epochs=2",
                          "--output_dir=/output/mine"]
    assert not (tmp_path / "runs").exists()  # it is a dry run
    assert words == dry_run(ROOT / "recipes/digits.flags", "--epochs=2", "--output_dir=mine", "--dry_run",
                            spelled=())


@pytest.mark.parametrize("engine, option, value", [("docker", "--gpus", "all"),
                                                   ("podman", "--device", "nvidia.com/gpu=all")])
def test_gpus_are_handed_over_in_the_engines_words(dry_run, tmp_path, engine, option, value):
    words = dry_run("digits", gpu=True, BIGBATCH_ENGINE=engine, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert words[0] == engine and after(option, words) == [value]
    # What the driver compiles is kept on the host.
    assert f"type=bind,source={tmp_path}/cache/bigbatch/cuda,target=/cuda-cache" in after("--mount", words)
    assert after("--env", words) == ["CUDA_CACHE_PATH=/cuda-cache"]


def test_what_the_driver_compiles_needs_a_folder_of_ones_own(tmp_path):
    (tmp_path / "nvidia-smi").symlink_to("/bin/true")
    done = call("bash", SCRIPT, "--dry-run", "digits", cwd=tmp_path, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1) and "$HOME is not" in done.stderr


@pytest.fixture
def ordinary_user(dry_run, tmp_path):
    """The user of `dry_run` is not root."""
    (tmp_path / "bin" / "id").unlink()
    write_program(tmp_path / "bin" / "id", "echo 1001")


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_podman_without_root_keeps_the_user_and_raises_no_limit(dry_run, ordinary_user):
    words = dry_run("digits", BIGBATCH_ENGINE="/usr/bin/podman")
    assert "--userns=keep-id" in words and "--ulimit" not in words and after("--user", words) == ["1001:1001"]
    assert "--userns=keep-id" not in dry_run("digits") and "--ulimit" in dry_run("digits")


# What these engines answer: podman 4.3.1 under docker's name, of a user and of root; Docker without root.
PODMAN, ROOTS_PODMAN, DOCKER = (f'case "$1" in --version) echo "{version}" ;; info) echo "{info}" ;; esac'
                                for version, info in (("podman version 4.3.1", "    rootless: true"),
                                                      ("podman version 4.3.1", "    rootless: false"),
                                                      ("Docker version 28", " Security Options:\n  rootless")))


@pytest.mark.parametrize(("answers", "user", "added", "gpus"), [
    (PODMAN, "1001:1001", "--userns=keep-id", "nvidia.com/gpu=all"),
    (ROOTS_PODMAN, "1001:1001", "--ulimit", "nvidia.com/gpu=all"), (DOCKER, "0:0", "--rm", "all")])
def test_the_engine_says_what_it_is(answers, user, added, gpus, dry_run, ordinary_user, tmp_path):
    write_program(tmp_path / "bin" / "docker", answers)
    words = dry_run("digits", gpu=True, XDG_CACHE_HOME=str(tmp_path))
    assert words[0] == "docker" and after("--user", words) == [user] and added in words
    assert ("--ulimit" in words) == (added == "--ulimit") and ("--userns=keep-id" in words) == (answers == PODMAN)
    assert gpus in [*after("--device", words), *after("--gpus", words)]


def test_docker_that_reaches_podman_is_named(dry_run, ordinary_user, tmp_path):
    """Docker's program with DOCKER_HOST=unix:///run/user/1001/podman/podman.sock."""
    write_program(tmp_path / "bin" / "docker", 'case "$1" in version) printf "Server:\\n Podman Engine:\\n" ;; esac')
    done = call("bash", SCRIPT, "--dry-run", "digits", cwd=tmp_path, env={"PATH": f"{tmp_path}/bin"})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "set BIGBATCH_ENGINE=podman" in done.stderr


def test_what_selinux_needs_is_passed_on(dry_run):
    words = dry_run("--security-opt", "label=disable", "--security-opt=seccomp=mine", "digits")
    assert [word for word in words if "security" in word] == ["--security-opt=label=disable",
                                                              "--security-opt=seccomp=mine"]


def test_folders_and_files_of_the_host_are_mounted(dry_run, tmp_path):
    (tmp_path / "my data").mkdir()
    (tmp_path / "my own.flags").write_text("--epochs=1\n")
    words = dry_run("--image=mine", "--data", "my data", "--output=out: there", "my own.flags", "--data_dir=digits")
    assert after("--mount", words) == [f"type=bind,source={tmp_path}/my data,target=/data,readonly",
                                       f"type=bind,source={tmp_path}/my own.flags,target=/recipe/my own.flags,readonly",
                                       f"type=bind,source={tmp_path}/out: there,target=/output"]
    assert words[-5:] == ["mine", "launch/dgx1.sh", "/recipe/my own.flags", "--data_dir=/data", "--data_dir=digits"]


def test_a_tilde_in_quotes_is_the_home_folder(dry_run, tmp_path):
    (tmp_path / "own.flags").touch()
    words = dry_run("--data=~", "--output", "~/out", "~/own.flags", "--output_dir=~/out/a", HOME=str(tmp_path))
    assert after("--mount", words) == [f"type=bind,source={tmp_path},target=/data,readonly",
                                       f"type=bind,source={tmp_path}/out,target=/output",
                                       f"type=bind,source={tmp_path}/own.flags,target=/recipe/own.flags,readonly"]
    assert words[-1] == "--output_dir=/output/a"


def test_without_a_recipe_train_py_chooses_it(dry_run, tmp_path):
    words = dry_run(f"--data={tmp_path}", "--", "--epochs=2", "--output_dir=a")
    assert words[-5:] == ["launch/dgx1.sh", "--", "--data_dir=/data", "--epochs=2", "--output_dir=/output/a"]


@pytest.mark.parametrize("given, inside", [
    (["--output_dir=a/b"], ["--output_dir=/output/a/b"]), (["--output_dir", "a"], ["--output_dir", "/output/a"]),
    (["--output_dir=runs/a"], ["--output_dir=/output/a"]), (["--output_dir=/output/a"], ["--output_dir=/output/a"]),
    (["--output_dir={here}/runs/a"], ["--output_dir=/output/a"]), (["--output_dir"], ["--output_dir"]),
])
def test_a_run_lies_on_the_output_folder(dry_run, tmp_path, given, inside):
    words = dry_run("digits", *(word.format(here=tmp_path) for word in given))
    assert words[-len(inside):] == inside


def test_what_is_set_for_nccl_and_its_like_holds_inside(dry_run):
    inside = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "CUDA_LAUNCH_BLOCKING": "1", "UCX_TLS": "tcp",
              "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT": "1", "NVIDIA_TF32_OVERRIDE": "0", "OMPI_MCA_btl": "self",
              "HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
    outside = {"CUDA_HOME": "/opt/cuda", "CUDA_PATH": "/opt/cuda", "CUDA_CACHE_PATH": "/home/me", "TF_VAR_secret": "x",
               "HOROVOD_NCCL_HOME": "/usr", "NVIDIA_DRIVER": "535"}
    assert after("--env", dry_run("digits", **inside, **outside)) == sorted(inside)
    assert "--cap-add=SYS_NICE" in dry_run("digits")


@pytest.mark.parametrize("arguments, code, message", [
    (["--gpu", "digits"], 2, "there is no option --gpu"),
    ([], 2, "the recipe is missing"),
    (["--image"], 2, "--image needs a value"),
    (["--security-opt="], 2, "--security-opt needs a value"),
    (["--data=/no/such", "digits"], 1, "the folder /no/such does not exist"),
    (["digits", "--output_dir=/elsewhere/run"], 2, "is lost with the container"),
    (["digits", "--output_dir", "s3://bucket/run"], 2, "nothing can be written to an address"),
    (["--output=file:///data", "digits"], 2, "nothing can be written to an address"),
    (["--data=", "digits"], 2, "--data needs a value"),
    (["digits"], 1, "there is no no-such-engine"),
])
def test_bad_input_ends_in_one_line(arguments, code, message):
    done = call(SCRIPT, *arguments, env=os.environ | {"BIGBATCH_ENGINE": "no-such-engine"})
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_hadolint_finds_nothing():
    done = call(require_tool("hadolint"), ROOT / "Dockerfile")
    assert done.returncode == 0, done.stdout


# --- the image itself ---

@pytest.fixture(scope="module", name="engine")
def running_engine():
    yield from container.engine()


@pytest.fixture
def home():
    """A folder of SOMEBODY's with a copy of launch/, for a user who may not look into this checkout."""
    with tempfile.TemporaryDirectory(dir=STORE) as folder:
        shutil.copytree(ROOT / "launch", Path(folder) / "launch", ignore=shutil.ignore_patterns("__pycache__"))
        os.chown(folder, SOMEBODY, SOMEBODY)
        yield Path(folder)


def in_image(engine, *arguments, options=(), **named):
    return call(engine, "run", "--rm", *options, IMAGE, *arguments, **named)


def as_somebody(home, engine, *arguments) -> subprocess.Popen:
    """launch/docker.sh, started by SOMEBODY in a process group of its own."""
    return subprocess.Popen([str(word) for word in ("launch/docker.sh", f"--image={IMAGE}", *arguments)], cwd=home,
                            env={"PATH": os.environ["PATH"], "HOME": str(home), "XDG_RUNTIME_DIR": str(home),
                                 "BIGBATCH_ENGINE": str(engine)},
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                            user=SOMEBODY, group=SOMEBODY, extra_groups=[], start_new_session=True)


def finished(process, timeout=300) -> subprocess.CompletedProcess:
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for_checkpoint(process, run: Path) -> None:
    deadline = time.monotonic() + 300
    while not list(run.glob("checkpoints/step-*[0-9]")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.container
def test_flags_are_for_train_and_nobody_is_root(engine):
    done = in_image(engine, "--help")
    assert done.returncode == 0 and "Data and model:" in done.stdout
    done = in_image(engine, "--no_such_flag")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert in_image(engine, "id", "-u").stdout == "10000\n"
    done = in_image(engine, "sh", "-c", "command -v g++ make uv; touch train.py launch/new .venv/new; ls -d ~/.",
                    options=[ANYBODY])
    assert done.stdout == "/home/bigbatch/.\n" and done.stderr.count("Permission denied") == 3


LACKING = """
import importlib.util, pathlib, sys
print(*[name for name in ("pytest", "flask", "moto", "hypothesis", "ruff") if importlib.util.find_spec(name)],
      *pathlib.Path().glob("tests"), *pathlib.Path(sys.prefix).rglob("tensorflow/include"))
"""


@pytest.mark.container
def test_what_builds_and_tests_is_not_in_the_image(engine):
    assert in_image(engine, "python", "-c", LACKING).stdout == "\n"
    done = in_image(engine, "sh", "-c", "command -v cc gcc g++ make ld; dpkg --list '*-dev' 2>&1 | grep ^ii")
    assert done.stdout == "" and done.returncode == 1, done.stdout


@pytest.mark.container
def test_two_workers_train_inside(engine):
    done = in_image(engine, "mpirun", "--oversubscribe", "-np", "2", "python", "train.py", *QUICK, "--epochs=1",
                    options=[ANYBODY, "--shm-size=512m"], timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert printed_json(done)["world_size"] == 2 and "run: /opt/bigbatch/runs/" in done.stderr


@pytest.mark.container
def test_a_recipe_of_ones_own_is_trained_for_its_owner(engine, home):
    (home / "my own.flags").write_text("\n".join(("--flagfile=recipes/digits.flags", *QUICK, "--epochs=1")))
    done = finished(as_somebody(home, engine, "--output=out", "my own.flags", "--output_dir=mine"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert printed_json(done)["epochs"] == 1 and len(rows(home / "out" / "mine")) == 1
    written = [home / "out", *(home / "out").rglob("*")]
    assert home / "out" / "mine" / "summary.json" in written
    assert {(path.stat().st_uid, path.stat().st_gid) for path in written} == {(SOMEBODY, SOMEBODY)}
    assert all(path.stat().st_mode & stat.S_IRUSR for path in written)


@pytest.mark.container
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_saves_and_the_same_command_goes_on(engine, home, number):
    command = ("digits", *QUICK, "--epochs=40", "--checkpoint_every=0.5", "--output_dir=mine")
    process = as_somebody(home, engine, *command)
    wait_for_checkpoint(process, home / "runs" / "mine")
    process.send_signal(number)
    done = finished(process)
    assert done.returncode == 75 and "stopped on request" in done.stderr, done.stderr[-3000:]
    done = finished(as_somebody(home, engine, *command))
    assert done.returncode == 0 and "resumed after step" in done.stderr, done.stderr[-3000:]
    assert [row["epoch"] for row in rows(home / "runs" / "mine")] == list(range(1, 41))


@pytest.mark.container
def test_ctrl_c_ends_the_container(engine, home):
    process = as_somebody(home, engine, "digits", *QUICK, "--epochs=1000", "--checkpoint_every=1", "--output_dir=mine")
    wait_for_checkpoint(process, home / "runs" / "mine")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert finished(process, 60).returncode not in (0, 75)
    assert call(engine, "ps", "--quiet").stdout == ""


@pytest.mark.container
def test_a_wrong_flag_is_2_and_a_missing_image_1_outside_too(engine, home):
    done = finished(as_somebody(home, engine, "digits", "--optimizer=none"))
    assert done.returncode == 2 and "optimizer" in done.stderr, done.stderr
    done = finished(as_somebody(home, engine, "--image=no-such-image", "digits"))
    assert done.returncode == 1 and "has no image no-such-image" in done.stderr and len(done.stderr.splitlines()) == 1


POD = """
mkdir -m 700 ~/.ssh && cd ~/.ssh && ssh-keygen -q -t ecdsa -N '' -f id_rsa && cp id_rsa.pub authorized_keys
cd /opt/bigbatch
launch/kubernetes/worker.sh & pod=$!
for try in {1..50}; do ssh -o BatchMode=yes w.job.default.svc true && break; sleep 0.2; done
ssh -o BatchMode=yes w.job.default.svc 'id -u; pkill --version'
kill $pod; wait $pod; echo "ended with $?"
ls /etc/ssh | grep -c host_
"""


@pytest.mark.container
def test_a_pod_of_kubernetes_takes_workers_over_ssh_until_it_is_stopped(engine):
    """Its user has the operator's keys, and no host key is in the image."""
    done = call(engine, "run", "--rm", "--add-host=w.job.default.svc:127.0.0.1", IMAGE, "bash", "-c", POD)
    assert done.stdout.split("\n")[0] == "10000" and "procps" in done.stdout, done.stderr
    assert done.stdout.endswith("ended with 1\n0\n"), done.stdout + done.stderr
