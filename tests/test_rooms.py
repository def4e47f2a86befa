"""The house: what each room may import, where the list of rooms stands, and the way from main to the step."""
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


WAY = """
import json, sys, traceback
import train
from training import build
made = build.make_train_step
def make_train_step(*arguments, **options):
    step = made(*arguments, **options)
    def counted(*inputs):
        way.append([f"{frame.filename}:{frame.name}" for frame in traceback.extract_stack()])
        return step(*inputs)
    counted.get_concrete_function = step.get_concrete_function
    return counted
build.make_train_step, way = make_train_step, []
code = train.main(["train.py", "--model=convnet", "--epochs=0.05", "--warmup=none", *sys.argv[1:]])
print(json.dumps(way[0]), file=sys.stderr)
sys.exit(code)
"""


def test_the_step_is_five_frames_from_main(tmp_path):
    done = run("python", 1, "-c", WAY, f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    frames = json.loads(done.stderr.splitlines()[-1])
    ours = [frame.rpartition("/")[2] for frame in frames if frame.startswith(str(ROOT)) and ".venv" not in frame]
    ours = ours[ours.index("train.py:main"):]
    assert ours == ["train.py:main", "train.py:train", "run.py:attempt", "loop.py:follow_plan"], frames  # then the step


def test_dry_run_imports_neither_tensorflow_nor_horovod():
    program = ("import sys, train; code = train.main(['train.py', '--dry_run', '--train_samples=1437']); "
               "print(sorted({'tensorflow', 'horovod'} & set(sys.modules)), file=sys.stderr); sys.exit(code)")
    done = run("python", 1, "-c", program, cold=True)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]", done.stderr
    assert json.loads(done.stdout)["workers"] == 1
