"""The house: what each room may import, and where the list of rooms stands."""
import configparser
import json
import subprocess

from conftest import BIN, ROOT, run

CONFIGURATION = configparser.ConfigParser()
CONFIGURATION.read(ROOT / "setup.cfg")
ROOMS = CONFIGURATION["importlinter"]["root_packages"].split()


def test_imports_lead_downwards():
    """The contracts stand in setup.cfg; imports within functions count, too."""
    done = subprocess.run([BIN / "lint-imports", "--config=setup.cfg", "--no-cache", "--no-logo"], cwd=ROOT, text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0 and "5 kept, 0 broken" in done.stdout, done.stdout + done.stderr


def test_rooms_are_packaged_and_known_to_the_linter_to_preflight_and_the_image():
    from launch import facts

    packaged = CONFIGURATION["options"]["packages"].split()
    layers = CONFIGURATION["importlinter:contract:layers"]["layers"].replace("|", " ").split()
    assert {*packaged} == {".".join(path.parent.relative_to(ROOT).parts) for room in {*facts.ROOMS} - {"examples"}
                           for path in (ROOT / room).rglob("*.py")}
    assert {*facts.ROOMS} == {*ROOMS} == {*layers}
    assert {f"!{room}" for room in ROOMS} <= {*(ROOT / ".dockerignore").read_text().split()}


def test_dry_run_imports_neither_tensorflow_nor_horovod():
    program = ("import sys, train; code = train.main(['train.py', '--dry_run', '--train_samples=1437']); "
               "print(sorted({'tensorflow', 'horovod'} & set(sys.modules)), file=sys.stderr); sys.exit(code)")
    done = run("python", 1, "-c", program, cold=True)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]", done.stderr
    assert json.loads(done.stdout)["workers"] == 1
