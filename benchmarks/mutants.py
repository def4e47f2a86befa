"""What do the tests catch? `uv run python -m benchmarks.mutants --output_dir=runs/mutants [--each=15] [ROOM ...]`

It draws mutants of the code that results depend on, with seed 0, so many per room: a comparison, an operator or a
constant that is another one, a condition that is negated. Each runs in a copy of the repository against all default
tests of its room. A mutant survives if they pass. A line of JSON per mutant, then for each room how many were caught,
and its tests of at least a second that no mutant needs: they catch none, or a cheaper test catches the same. If it is
stopped, the same command continues. Two commands with different rooms can run side by side.
"""
import argparse
import ast
import collections
import copy
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
ROOMS = {"optim": ("optim/*.py",), "plan": ("plan/*.py",), "data": ("data/order.py", "data/augmentation.py"),
         "distributed": tuple(f"distributed/{name}.py" for name in ("exchange", "fixed_point", "torus")),
         "training": tuple(f"training/{name}.py" for name in ("step", "loop", "recovery", "checkpoints", "batch_norm"))}
OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
         ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
         ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
         ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And}
LIMIT = 900  # seconds; a mutant that takes longer hangs, and is caught


def mutated(node: ast.AST) -> bool:
    """Changes a node in one way. Returns whether there is one."""
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OTHER:
        node.op = OTHER[type(node.op)]()
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        node.ops[0] = OTHER[type(node.ops[0])]()
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    else:
        return False
    return True


def drawn(room: str, number: int) -> list[tuple[Path, int, str, str]]:
    """Returns mutants of a room: file, line, the statement before and after, and the text of the mutated file."""
    every = []
    for path in sorted(path for pattern in ROOMS[room] for path in ROOT.glob(pattern)):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        every += [(path, index) for index, node in enumerate(nodes) if mutated(copy.deepcopy(node))]
    found = []
    for path, index in random.Random(0).sample(every, number):
        tree = ast.parse(path.read_text())
        node = list(ast.walk(tree))[index]
        before = ast.unparse(node)
        mutated(node)
        found.append((path, node.lineno, f"{before} -> {ast.unparse(node)}", ast.unparse(tree)))
    return found


def tested(path: Path, text: str, room: str) -> dict:
    """Runs a room's tests on a mutated file. Returns the tests that failed, and the seconds of each that ended."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".venv", "runs", ".git"))
        (Path(folder) / path.relative_to(ROOT)).write_text(text)
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={junit}",
                   f"tests/{room}"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return {"caught_by": ["a test that hangs"], "test_seconds": {}}
        if not junit.exists():
            return {"caught_by": [done.stdout[-200:] + done.stderr[-200:]], "test_seconds": {}}
        cases = {f"{case.get('classname')}::{case.get('name')}": case
                 for case in ElementTree.parse(junit).iter("testcase")}
    failed = [name for name, case in cases.items() if {child.tag for child in case} & {"failure", "error"}]
    return {"caught_by": failed, "test_seconds": {name: float(case.get("time")) for name, case in cases.items()}}


def unneeded(rows: list[dict]) -> dict[str, float]:
    """Returns the tests that catch no mutant which no cheaper test catches, with their median seconds."""
    seconds = collections.defaultdict(list)
    for row in rows:
        for name, value in row["test_seconds"].items():
            seconds[name].append(value)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    needed = set()
    for row in rows:
        if caught := [name for name in row["caught_by"] if name in median]:
            needed.add(min(caught, key=median.get))
    return {name: value for name, value in median.items() if name not in needed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="*", default=[*ROOMS], choices=ROOMS)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--each", type=int, default=15, help="mutants per room")
    options = parser.parse_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for room in options.rooms:
        log = options.output_dir / f"{room}.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        for path, line, change, text in drawn(room, options.each)[len(rows):]:
            began = time.monotonic()
            rows.append({"where": f"{path.relative_to(ROOT)}:{line}", "change": change, **tested(path, text, room)})
            rows[-1]["seconds"] = round(time.monotonic() - began)
            log.write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(json.dumps({name: value for name, value in rows[-1].items() if name != "test_seconds"}), flush=True)
        print(f"{room}: {sum(bool(row['caught_by']) for row in rows)} of {len(rows)} caught", flush=True)
        for name, seconds in sorted(unneeded(rows).items(), key=lambda pair: -pair[1]):
            if seconds >= 1:
                print(f"{seconds:8.1f} s {name}", flush=True)


if __name__ == "__main__":
    main()
