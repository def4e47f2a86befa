"""Counts the faults that a training run survives, and measures their cost: `uv run python -m benchmarks.faults`.

It trains the digits on two workers, first undisturbed, then with one fault after another. A fault kills one worker,
kills all of them and mpirun, or asks one to stop. It ends the training, and the same command runs again. The seed
determines the kind, the worker and the step of each fault. Some faults strike while a checkpoint is written. A fault is
survived if mpirun ends with the expected exit code and no worker remains. At the end, every variable of the last
checkpoint, including those of optimizer and batch norm, and every row of metrics.jsonl, except its times, must be
bit-identical to the undisturbed run. Otherwise, or if a fault was not survived, the exit code is 1.
"""
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from absl import app
from absl import flags as absl_flags

from tests.rigs.trainings import PATIENCE, differences, newest_step, start, trainers, wait_for

TRAINING = ("--model=resnet20", "--checkpoint_every=0.2", "--deterministic")
MARGIN = 12  # number of last steps without faults


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    exit_code: expected from mpirun. all: whether it hits all workers and mpirun. writing: whether it hits while a
    checkpoint is being written.
    """

    name: str
    signal: signal.Signals
    exit_code: int
    all: bool = False
    writing: bool = False


KINDS = (
    Kind("SIGKILL, one worker", signal.SIGKILL, 128 + signal.SIGKILL),
    Kind("SIGKILL, all workers and mpirun", signal.SIGKILL, -signal.SIGKILL, all=True),
    Kind("SIGKILL, all, while writing a checkpoint", signal.SIGKILL, -signal.SIGKILL, all=True, writing=True),
    Kind("SIGTERM, one worker", signal.SIGTERM, 75),
    Kind("SIGUSR1, one worker", signal.SIGUSR1, 75),
)


@dataclass(frozen=True)
class Fault:
    """A fault and its cost.

    survived: whether mpirun ended with the expected exit code and no worker remained. steps_lost: steps since the last
    checkpoint, estimated from the time since then and the time of a step. ended: seconds until all processes had ended.
    resumed: seconds from the next start until a new checkpoint is written.
    """

    kind: Kind
    worker: int
    step: int
    survived: bool
    steps_lost: float
    ended: float
    resumed: float = 0.0


def strike(folder: Path, launcher, kind: Kind, worker: int, step: int, delay: float, step_seconds: float) -> Fault:
    """Waits for a checkpoint of this step or a later one and for `delay` seconds, injects the fault, waits for the end.

    step_seconds: time of a step, from which the lost steps are estimated.
    """
    wait_for(lambda: newest_step(folder) >= step, launcher)
    time.sleep(delay)
    if kind.writing:
        wait_for(lambda: any((folder / "checkpoints").glob("step-*.part")), launcher, pause=0)
    processes = trainers(launcher)
    struck = [psutil.Process(launcher.pid), *processes] if kind.all else [processes[worker]]
    for process in struck:
        process.send_signal(kind.signal)
    began = time.monotonic()
    exit_code = launcher.wait(PATIENCE)
    _, alive = psutil.wait_procs(processes, timeout=10)
    for process in alive:
        process.kill()
    shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{launcher.pid}", ignore_errors=True)  # a killed mpirun leaves it
    last = max((folder / "checkpoints").glob("step-*[0-9]")).stat().st_mtime
    lost = 0.0 if exit_code == 75 else max(0.0, time.time() - (time.monotonic() - began) - last) / step_seconds
    return Fault(kind, worker, step, exit_code == kind.exit_code and not alive, lost, time.monotonic() - began)


def campaign(folder: Path, faults: int, workers: int, seed: int, flags=TRAINING, python=sys.executable
             ) -> tuple[list[Fault], list[str]]:
    """Returns (the faults, how the disturbed training differs from the undisturbed one).

    python: interpreter of the workers.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    flags = (*flags, f"--epochs={max(8, faults)}")  # a fault takes up to nine steps, an epoch has eleven
    undisturbed, disturbed, rng = folder / "undisturbed", folder / "disturbed", random.Random(seed)
    if start(undisturbed, workers, flags, python).wait(20 * PATIENCE):
        raise RuntimeError(f"the undisturbed training failed; see {undisturbed}.log")
    steps = json.loads((undisturbed / "plan.json").read_text())["steps"]
    step_seconds = json.loads((undisturbed / "summary.json").read_text())["seconds"] / steps
    kinds = [KINDS[number % len(KINDS)] for number in range(faults)]
    rng.shuffle(kinds)
    struck = []
    launcher = start(disturbed, workers, flags, python)
    for kind, step in zip(kinds, sorted(rng.choices(range(steps - MARGIN), k=faults)), strict=True):
        fault = strike(disturbed, launcher, kind, rng.randrange(workers), step, rng.random() / 2, step_seconds)
        began, reached = time.monotonic(), newest_step(disturbed)
        launcher = start(disturbed, workers, flags, python)
        wait_for(lambda reached=reached: newest_step(disturbed) > reached, launcher)
        struck.append(Fault(**vars(fault) | {"resumed": time.monotonic() - began}))
        print(f"{kind.name}, worker {fault.worker}, after step {step}: {'survived' if fault.survived else 'LOST'}",
              file=sys.stderr)
    if launcher.wait(20 * PATIENCE):
        return struck, [f"the last part of the disturbed training failed; see {disturbed}.log"]
    return struck, differences(undisturbed, disturbed)


def table(faults: list[Fault]) -> str:
    lines = ["| fault | injected | survived | steps lost, mean (max) | seconds to exit, max | to resume, mean |",
             "| --- | --- | --- | --- | --- | --- |"]
    for kind in KINDS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        if of_kind:
            lost, ended, resumed = (np.array([getattr(fault, name) for fault in of_kind])
                                    for name in ("steps_lost", "ended", "resumed"))
            lines.append(f"| {kind.name} | {len(of_kind)} | {sum(fault.survived for fault in of_kind)} | "
                         f"{lost.mean():.1f} ({lost.max():.1f}) | {ended.max():.1f} | {resumed.mean():.1f} |")
    return "\n".join(lines)


def main(argv) -> int:
    del argv
    values = absl_flags.FLAGS
    faults, differing = campaign(Path(values.output_dir).absolute(), values.faults, values.workers, values.seed)
    print(table(faults))
    same = f"differs in {len(differing)}: {', '.join(differing[:5])}" if differing else "is bit-identical"
    print(f"{len(faults)} faults, {sum(fault.survived for fault in faults)} survived; the result {same}")
    return int(bool(differing) or not all(fault.survived for fault in faults))


if __name__ == "__main__":
    absl_flags.DEFINE_integer("faults", 24, "Number of faults.", lower_bound=1)
    absl_flags.DEFINE_integer("workers", 2, "Number of workers.", lower_bound=1)
    absl_flags.DEFINE_integer("seed", 0, "Seed of the kinds, workers and steps of the faults.")
    absl_flags.DEFINE_string("output_dir", "runs/faults", "Folder for the two runs.")
    app.run(main)
