"""Programs that people start: one frame for help, version and exit codes."""
import importlib

import pytest
from conftest import ROOT

from common import VERSION

ROOMS = ("data", "reporting", "experiments", "launch")
PROGRAMS = ["train", *(".".join(path.relative_to(ROOT).with_suffix("").parts) for room in ROOMS
                       for path in sorted((ROOT / room).rglob("*.py")) if "main(sys.argv)" in path.read_text())]
PROGRAMS.remove("launch.binding")  # runs any command, whose flags are its own


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_says_what_it_does_and_its_version(name, capsys):
    program = importlib.import_module(name)
    assert program.main([name, "--version"]) == 0
    shown, errors = capsys.readouterr()
    assert shown.split()[:2] == ["bigbatch", VERSION] and not errors
    assert program.main([name, "--help"]) == 0
    shown, errors = capsys.readouterr()
    assert not errors and len(shown.splitlines()) > 3
    if name not in ("train", "launch.horovodrun"):  # whose flags say it
        assert shown.startswith(program.__doc__)
