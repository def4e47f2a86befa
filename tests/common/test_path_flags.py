"""Flags that hold paths: ~ is the home folder, none is empty, and nothing is written to an address."""
import dataclasses
import subprocess

import pytest
from conftest import BIN, ROOT

from common import flags
from common.errors import UsageError, UserError
from data import prepare
from experiments import benchmark, planned, rehearse, verify
from launch import hosts, scaling
from plan import flags as train_flags
from plan.recipes import recipe_path
from reporting import report

PROGRAMS = {  # each program's dataclasses of flags -> function that defines all of its flags
    "train": ((*train_flags.GROUPS.values(),), train_flags.define),
    "data.prepare": ((prepare.Options,), lambda: flags.define(prepare.Options)),
    "experiments.sweep": ((planned.Options,), lambda: train_flags.define(planned.Options)),
    "experiments.rehearse": ((rehearse.Options,), lambda: train_flags.define(rehearse.Options)),
    "experiments.verify": ((verify.Options,), lambda: train_flags.define(verify.Options)),
    "experiments.benchmark": ((benchmark.Options,), benchmark.all_flags),
    "reporting.report": ((report.Options,), lambda: flags.define(report.Options)),
    "launch.scaling": ((scaling.Options,), lambda: scaling.all_flags(has_recipe=True))}

WRITTEN = {"train": {"output_dir", "stage_dir", "timeline"}, "data.prepare": {"output"}, "reporting.report": {"output"},
           "launch.scaling": {"stage_dir"}}  # for the others, output_dir


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/mine")


def paths_of(program) -> list[str]:
    """A text that is neither one of some choices nor parsed is the name of a file or folder, in all programs."""
    groups, define = PROGRAMS[program]
    named = [field.name for group in groups for field in dataclasses.fields(group) if field.type in (str, str | None)
             and not field.metadata.get("choices") and not field.metadata.get("parse")]
    return [name for name in dict.fromkeys((*named, "data_dir", "output_dir", "image")) if name in define()]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_path_is_not_empty_and_nothing_is_written_to_an_address(program):
    define = PROGRAMS[program][1]
    for name in paths_of(program):
        for words in ([f"--{name}="], [f"--{name}", ""]):
            with pytest.raises(UsageError, match=f"flag --{name}=: the path is empty"):
                flags.read(define(), ["program", *words])
        for address in ("s3://bucket/run", "https://host/run", "file:///data/run", "S3a://bucket"):
            if name in WRITTEN.get(program, {"output_dir"}):
                with pytest.raises(UsageError, match=f"flag --{name}={address}: nothing can be written to an address"):
                    flags.read(define(), ["program", f"--{name}={address}"])
            else:
                assert address in flags.read(define(), ["program", f"--{name}={address}"])[name].serialize()
        assert flags.read(define(), ["program", f"--{name}=a:/b//c"])[name].value in ("a:/b//c", ["a:/b//c"])


def test_an_empty_argument_is_one_line():
    with pytest.raises(UsageError, match="the path is empty"):
        flags.read_with_arguments(flags.define(report.Options), ["report", "run", ""])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_tilde_is_the_home_folder_in_every_flag_that_is_a_free_text(program):
    define, given = PROGRAMS[program][1], paths_of(program)
    values = flags.read(define(), ["program", *(f"--{name}=~/a/~" for name in given)])
    assert given or program == "experiments.verify"
    for name in given:
        assert values[name].value == (["/home/mine/a/~"] if name == "image" else "/home/mine/a/~")
        assert "--" + name + "=/home/mine/a/~" in values[name].serialize()  # what flags.txt records


def test_a_tilde_is_the_home_folder_in_arguments():
    values = flags.define(report.Options)
    assert flags.read_with_arguments(values, ["report", "~/a", "--output=~", "b~"]) == ["/home/mine/a", "b~"]
    assert values.output == "/home/mine"
    assert train_flags.parse(["train.py", "--mode=predict", "--image=~/1.png", "~/2.png", "--data_dir=digits",
                              f"--flagfile={ROOT}/recipes/digits.flags", "--checkpoint=~/run"]
                             ).run.image == ("/home/mine/1.png", "/home/mine/2.png")


def test_a_tilde_is_the_home_folder_in_launchers(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.flags").touch()
    assert recipe_path("~/own.flags") == tmp_path / "own.flags"
    (tmp_path / "hosts").write_text("h1 slots=2\n")
    assert [host.name for host in hosts.read("~/hosts")] == ["h1"]
    with pytest.raises(UserError, match="there is no recipe ~/none"):
        recipe_path("~/none")
    script = (". launch/common.sh; for path in '~' '~/a b' '~other/a' 'a/~' '-n' ''; do expanded \"$path\"; done")
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines() == [str(tmp_path), f"{tmp_path}/a b", "~other/a", "a/~", "-n", ""]


@pytest.mark.parametrize("program", ["train.py", "data.prepare", "experiments.sweep", "launch.scaling"])
def test_help_does_not_need_docstrings(program):
    """Python removes them with -OO, or PYTHONOPTIMIZE=2. TensorFlow needs them."""
    words = [program] if program.endswith(".py") else ["-m", program]
    done = [subprocess.run([BIN / "python", *option, *words, "--help"], cwd=ROOT, text=True, capture_output=True)
            for option in ([], ["-OO"])]
    shown = [{line.split(":")[0] for line in one.stdout.splitlines() if line.startswith("  --")} for one in done]
    assert done[1].returncode == 0 and not done[1].stderr and shown[0] == shown[1] and len(shown[0]) > 4
    done = subprocess.run([BIN / "python", "-OO", *words], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "unset PYTHONOPTIMIZE" in done.stderr, done.stderr
