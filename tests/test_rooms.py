"""The house: what each room may import, how long a file or a function may be, and the way from main to the step."""
import ast
import json

import pytest
from conftest import ROOT, run

ROOMS = ("common", "model_zoo", "optim", "data", "distributed", "reporting", "training", "inference",
         "launch", "experiments")  # upwards
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
TREES = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in [ROOT / "train.py", *FILES]}


def imported(tree) -> set[str]:
    """The top-level names of all that a module imports, within functions, too."""
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", TREES, ids=str)
def test_a_room_imports_only_rooms_below_it(path):
    above = ROOMS[ROOMS.index(path.parts[0]) + 1:] if path.name != "train.py" else ()
    assert not imported(TREES[path]) & {*above, "train"}


def test_only_distributed_imports_horovod():
    assert {path.parts[0] for path, tree in TREES.items() if "horovod" in imported(tree)} == {"distributed"}


def test_rooms_are_packaged_and_known_to_preflight_and_the_image():
    from launch import facts

    folders = {path.parent.relative_to(ROOT) for path in FILES}
    packaged = (ROOT / "setup.cfg").read_text().partition("packages =\n")[2].partition("install_requires")[0].split()
    assert {*packaged} == {str(folder).replace("/", ".") for folder in folders}
    assert {*facts.ROOMS} == {*ROOMS}
    assert {f"!{room}" for room in ROOMS} <= {*(ROOT / ".dockerignore").read_text().split()}


@pytest.mark.parametrize("path", TREES, ids=str)
def test_files_and_functions_can_be_read_at_one_sitting(path):
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= 300
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 50, node.name


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


def test_flags_visit_few_files():
    """Those that name Settings, or one of its three groups."""
    groups = {"Settings", "Recipe", "Launch", "Run"}
    visited = [str(path) for path, tree in TREES.items() if groups & {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}]
    assert len(visited) <= 14, visited  # two of them for the modes of inference/


def test_dry_run_imports_neither_tensorflow_nor_horovod():
    program = ("import sys, train; code = train.main(['train.py', '--dry_run', '--train_samples=1437']); "
               "print(sorted({'tensorflow', 'horovod'} & set(sys.modules)), file=sys.stderr); sys.exit(code)")
    done = run("python", 1, "-c", program, cold=True)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]", done.stderr
    assert json.loads(done.stdout)["workers"] == 1
