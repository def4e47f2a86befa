import itertools
import json
import os
import signal
import subprocess
import time

import pytest
from conftest import BIN, ROOT, TINY, rows, scripts_environment
from PIL import Image

from tests.rigs.telling import SET, telling_python, told

pytestmark = pytest.mark.launchers

SCRIPT = ROOT / "launch" / "dgx1.sh"
QUICK = ("digits", *TINY)


def launch(*arguments, cold=False):
    """A finished launch. cold: of Python as it is, instead of forks."""
    return subprocess.run([SCRIPT, *map(str, arguments)], text=True, capture_output=True, timeout=200,
                          stdin=subprocess.DEVNULL, env=os.environ if cold else scripts_environment())


def test_two_bound_workers_train_after_a_check(tmp_path):
    """Cold, because a fork would not show a crash at Python's end."""
    done = launch("-np", 2, *QUICK, "--epochs=1", f"--output_dir={tmp_path / 'run'}", cold=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 2
    assert done.stderr.startswith("host ") and len(rows(tmp_path / "run")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_saves_and_the_same_command_goes_on(tmp_path, number):
    command = ("--no-preflight", *QUICK, "--epochs=16", "--checkpoint_every=0.5", f"--output_dir={tmp_path / 'run'}")
    process = subprocess.Popen([SCRIPT, *command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               stdin=subprocess.DEVNULL, env=scripts_environment())
    deadline = time.monotonic() + 300
    while not list((tmp_path / "run").glob("checkpoints/step-*[0-9]")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 75 and "stopped on request" in err, err
    done = launch(*command)
    assert done.returncode == 0 and "resumed after step" in done.stderr
    assert [row["epoch"] for row in rows(tmp_path / "run")] == list(range(1, 17))


def test_what_a_site_sets_for_the_network_reaches_the_workers(tmp_path):
    python = telling_python(tmp_path / "told")
    subprocess.run([SCRIPT, "--no-preflight", "-np", "2", *QUICK], timeout=200, stdin=subprocess.DEVNULL,
                   env=os.environ | SET | {"BIGBATCH_PYTHON": str(python)}, capture_output=True)
    assert SET in told(tmp_path / "told")  # mpirun ends the other worker, perhaps before it writes


def test_the_binding_is_shown():
    done = launch("--print-binding", "-np", 2)
    here, dgx1, *_ = done.stdout.split("\n\n")
    assert here.startswith("This machine") and len(here.splitlines()) == 4
    lines = dgx1.splitlines()
    assert lines[0].startswith("A DGX-1") and len(lines) == 10
    assert lines[2].split() == ["0", "0", "0", "10", "5", "0-4,40-44"]
    assert lines[9].split() == ["7", "7", "1", "10", "5", "35-39,75-79"]
    several = launch("--workers-per-gpu=2", "--print-binding").stdout.split("\n\n")[1].splitlines()
    assert len(several) == 18 and [line.split()[1] for line in several[2:]] == list("0123456701234567")


@pytest.mark.parametrize("words", [("--dry-run", "-np", 4, "digits", "--epochs=3", "--batch_size=256"),
                                   ("-np", 4, "digits", "--epochs=3", "--batch_size=256", "--dry_run"),
                                   ("-np", 4, "--dry_run", "digits", "--epochs=3", "--dry-run", "--batch_size=256")])
def test_dry_run_prints_the_plan_and_the_command(words):
    done = launch(*words)
    assert json.loads(done.stdout)["workers"] == 4 and json.loads(done.stdout)["epochs"] == 3
    shown, *hints = done.stderr.replace("'", "").splitlines()
    words = shown.split()
    assert words[:5] == ["mpirun", "--bind-to", "none", "-np", "4"]
    assert words[-3:] == [f"--flagfile={ROOT}/recipes/digits.flags", "--epochs=3", "--batch_size=256"]
    assert [line.split(":")[1] for line in hints] == [" --epochs=3", " --batch_size=256"]


@pytest.mark.parametrize("script", ["dgx1.sh -np 2", "horovodrun.sh -H a:2", "slurm/submit.sh --nodes=1 "
                                    "--workers-per-node=2"])
@pytest.mark.parametrize("recipe", ["--", "digits --"])
def test_without_a_recipe_train_py_chooses_it(script, recipe, tmp_path):
    """The one that fits 18 images, or with one the one that was named: the plan is train.py's."""
    for split, label, number in itertools.product(("train", "val"), ("cat", "dog"), range(9)):
        (tmp_path / split / label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "red").save(tmp_path / split / label / f"{number}.png")
    flags = [f"--data_dir={tmp_path}", "--dry_run"]
    named = [f"--flagfile={name}" for name in recipe.split()[:-1]]
    alone, launched = (subprocess.run(words, text=True, capture_output=True, timeout=200, cwd=tmp_path,
                                      env=scripts_environment()) for words in (
        [BIN / "python", ROOT / "train.py", *named, *flags, "--workers=2", "--workers_per_node=2"],
        [ROOT / "launch" / script.split()[0], *script.split()[1:], *recipe.split(), *flags]))
    assert json.loads(launched.stdout) == json.loads(alone.stdout), launched.stderr
    assert json.loads(alone.stdout)["phases"][0]["global_batch_size"] == (128 if named else 2)
    assert not named or all(line in launched.stderr for line in alone.stderr.splitlines())


def test_a_papers_exchange_comes_with_its_recipe():
    done = launch("--dry-run", "-np", 8, "sony_1811.05233/table3-experiment2")
    assert json.loads(done.stdout)["exchange"]["allreduce"] == "torus"
    note, command = done.stderr.splitlines()
    assert note == "dgx1.sh: table3-experiment2.launch adds --allreduce=torus --compression=fp16 --loss_scale=128"
    assert "table3-experiment2.flags" in command and "table3-experiment2.launch" in command
    overridden = launch("--dry-run", "-np", 8, "sony_1811.05233/table3-experiment2", "--allreduce=ring")
    assert json.loads(overridden.stdout)["exchange"]["allreduce"] == "ring"


@pytest.mark.parametrize("arguments, code, message", [
    ([], 2, "the recipe is missing"),
    (["--workers-per-gpu=many", "digits"], 2, "takes a number, not 'many'"),
    (["-np"], 2, "-np takes a number"),
    (["--gpus=3", "digits"], 2, "there is no option --gpus=3"),
    (["no-such"], 2, "there is no recipe no-such"),
    (["-np", "2", "digits", "--optimizer=adagrad"], 2, "optimizer"),
    (["-np", "3", "digits"], 1, "is not divisible"),
    (["digits", "--data_dir=/nowhere"], 1, "/nowhere"),
])
def test_wrong_arguments_are_one_line(arguments, code, message):
    done = launch(*arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), done.stderr
    assert message in done.stderr and done.stdout == ""
