"""The house: what each room may import, and where the list of rooms stands."""
import configparser
import json
import os
import re
import subprocess
import sys

from conftest import BIN, ROOT, run

CONFIGURATION = configparser.ConfigParser()
CONFIGURATION.read(ROOT / "setup.cfg")
ROOMS = CONFIGURATION["importlinter"]["root_packages"].split()


def test_imports_lead_downwards():
    """The contracts stand in setup.cfg; imports within functions count, too."""
    done = subprocess.run([BIN / "lint-imports", "--config=setup.cfg", "--no-cache", "--no-logo"], cwd=ROOT, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0 and "5 kept, 0 broken" in done.stdout, done.stdout + done.stderr


def test_rooms_are_known_to_the_linter_to_preflight_and_the_image():
    from launch import facts

    layers = CONFIGURATION["importlinter:contract:layers"]["layers"].replace("|", " ").split()
    assert {*facts.ROOMS} == {*ROOMS} == {*layers}
    assert {f"!{room}" for room in ROOMS} <= {*(ROOT / ".dockerignore").read_text().split()}


def test_readme_and_development_list_the_rooms_from_the_lowest_up():
    layers = CONFIGURATION["importlinter:contract:layers"]["layers"].split("\n")
    level = {room.strip(): -number for number, line in enumerate(layers) for room in line.split("|")}
    for page, pattern in (("README.md", r"^(\w+)/  +\w"), ("docs/development.md", r"^\| `(\w+)/` \|")):
        listed = re.findall(pattern, (ROOT / page).read_text(), re.MULTILINE)
        listed.remove("recipes")  # holds no code
        assert sorted(listed) == sorted(ROOMS) and listed == sorted(listed, key=level.get), page


def test_the_reading_path_leads_through_the_rooms():
    page = (ROOT / "docs" / "development.md").read_text()
    path = re.findall(r"^\d+\. `([\w/]+\.py)`:", page, re.MULTILINE)
    assert len(path) > 9 and path[0] == "train.py" and all((ROOT / name).is_file() for name in path)


def test_programs_start_in_any_folder(tmp_path):
    """Without PYTHONPATH: uv's environment names the checkout."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for program in ("experiments.sweep", "data.prepare", "reporting.report"):
        done = subprocess.run([sys.executable, "-m", program, "--help"], cwd=tmp_path, text=True, capture_output=True,
                              timeout=300, env=clean)
        assert done.returncode == 0 and f"python -m {program}" in done.stdout, done.stderr


def test_dry_run_imports_neither_tensorflow_nor_horovod():
    program = ("import sys, train; code = train.main(['train.py', '--dry_run', '--train_samples=1437']); "
               "print(sorted({'tensorflow', 'horovod'} & set(sys.modules)), file=sys.stderr); sys.exit(code)")
    done = run("python", 1, "-c", program, cold=True)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]", done.stderr
    assert json.loads(done.stdout)["workers"] == 1


def test_scipy_is_imported_where_it_is_used():
    """Its distributions take half a second of processor time, which each start would pay."""
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")
             if re.search("^(from|import) scipy", path.read_text(), re.MULTILINE)]
    assert found == []
