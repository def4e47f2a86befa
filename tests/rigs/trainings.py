"""Trainings under mpirun that a test disturbs and compares; benchmarks.faults does the same many times."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TIMES = ("images_per_second", "seconds")
PATIENCE = 900  # seconds after which a start or an end is taken for a hang


def start(folder: Path, workers: int, flags, python=sys.executable, program=ROOT / "train.py", launcher="mpirun",
          environment=()) -> subprocess.Popen:
    """Starts train.py under mpirun or horovodrun, with its output in FOLDER.log. environment: additions to it."""
    words = ([BIN / "mpirun", "--allow-run-as-root", "--oversubscribe"] if launcher == "mpirun" else
             [BIN / "python", "-m", "distributed.gloo", "--gloo"])
    with open(f"{folder}.log", "ab") as log:
        return subprocess.Popen(
            [*words, "-np", str(workers), python, program, *flags, f"--output_dir={folder}"], stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment))


def trainers(launcher: subprocess.Popen) -> list[psutil.Process]:
    """Returns the processes of train.py under a launcher, in the order of ranks."""
    found = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        try:
            own = process.environ()
            if any(word.endswith("train.py") for word in process.cmdline()):
                found[int(own.get("OMPI_COMM_WORLD_RANK") or own["HOROVOD_RANK"])] = process
        except (psutil.Error, KeyError):
            continue
    return [found[rank] for rank in sorted(found)]


def newest_step(folder: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*[0-9]")), default=-1)


def wait_for(what, launcher: subprocess.Popen, pause=0.002) -> None:
    """Waits until what() is true or the training has succeeded. Raises RuntimeError if it fails, or after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not what() and launcher.poll() != 0:
        if launcher.poll() is not None:
            raise RuntimeError(f"the training run ended before the fault, with exit code {launcher.poll()}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the training run hangs: what a test waits for has not come in {PATIENCE} s")
        time.sleep(pause)


def untimed(folder: Path) -> list[dict]:
    """Returns the rows of metrics.jsonl without the times."""
    return [{name: value for name, value in json.loads(line).items() if name not in TIMES}
            for line in (folder / "metrics.jsonl").read_text().splitlines()]


def differences(one: Path, other: Path) -> list[str]:
    """Returns the variables of the newest checkpoints and the rows of metrics.jsonl that differ in any bit.

    Times in metrics.jsonl may differ.
    """
    from training.restoring import intact

    (_, ours, _), (_, theirs, _) = (next(intact(folder)) for folder in (one, other))
    found = [name for name in sorted(ours.keys() | theirs.keys())
             if name not in ours or name not in theirs or ours[name].tobytes() != theirs[name].tobytes()]
    rows = [untimed(folder) for folder in (one, other)]
    if len(rows[0]) != len(rows[1]):
        found.append(f"metrics.jsonl: {len(rows[0])} rows instead of {len(rows[1])}")
    return found + [f"metrics.jsonl, epoch {a['epoch']}" for a, b in zip(*rows, strict=False) if a != b]
