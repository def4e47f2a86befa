"""Programs that people start: one frame for help, version and exit codes."""
import importlib
import os
import re

import pytest
from conftest import ROOT

from common import VERSION
from common.launcher import LAUNCHERS

ROOMS = ("data", "reporting", "experiments", "launch")
PROGRAMS = ["train", *(".".join(path.relative_to(ROOT).with_suffix("").parts) for room in ROOMS
                       for path in sorted((ROOT / room).rglob("*.py")) if "main(sys.argv)" in path.read_text())]
SUGGESTED = {  # words -> what is said
    "experiments.sweep --lr=3": "did you mean --learning_rate?", "train --nofrezee": "did you mean --nofreeze?",
    "train --BatchSize=3": "did you mean --batch_size?", "train epochs=3": "'epochs=3' is not a flag; give --epochs=3",
    "train --gpus=2": "start one worker per GPU: horovodrun", "launch.scaling --gpus=2": "did you mean --workers?",
    "experiments.benchmark --dataset=x": "did you mean --data_dir?", "train --e=3": "flag 'e'\n",
    "data.prepare --learning_rate=3": "flag 'learning_rate'\n"}
UNDER_LAUNCHERS = {"train", "data.prepare", "experiments.benchmark", "launch.preflight", "launch.facts", "launch.job",
                   "launch.binding"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_says_what_it_does_and_its_version(name, capsys):
    program = importlib.import_module(name)
    assert program.main([name, "--version"]) == 0
    shown, errors = capsys.readouterr()
    assert shown.split()[:2] == ["bigbatch", VERSION] and not errors
    assert program.main([name, "--help"]) == 0
    shown, errors = capsys.readouterr()
    assert not errors and len(shown.splitlines()) > 3
    if name != "train":  # whose flags say it
        assert shown.startswith(program.__doc__)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("launch.facts", "launch.preflight")])
def test_every_program_names_the_flag_that_is_nearest_to_a_mistyped_one(name, capsys):
    program = importlib.import_module(name)
    program.main([name, "--help"])  # that of the two above lists none; they have those of train.py
    flag = max(re.findall(r"^  --(\w+)", capsys.readouterr().out, re.MULTILINE), key=len)
    assert program.main([name, f"--{flag[:3]}{flag[4:]}=1", "digits"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"did you mean --{flag}?")


@pytest.mark.parametrize("words", SUGGESTED)
def test_what_else_a_flag_may_have_meant(words, capsys):
    name, *flags = words.split()
    assert importlib.import_module(name).main([name, *flags]) == 2
    [line] = capsys.readouterr().err.splitlines(keepends=True)
    assert SUGGESTED[words] in line


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in UNDER_LAUNCHERS])
@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE"])
def test_a_program_that_runs_alone_says_so_under_a_launcher(name, variable, monkeypatch, capsys):
    for other in [one for one in os.environ if one.startswith(LAUNCHERS)]:
        monkeypatch.delenv(other)
    monkeypatch.setenv(variable, "2")
    assert importlib.import_module(name).main([name, "--no_such_flag"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"this command runs alone, and a launcher has started it several times ({variable}=2); start it" in line
    monkeypatch.setenv(variable, "1")
    importlib.import_module(name).main([name, "--no_such_flag"])
    assert "alone" not in capsys.readouterr().err
