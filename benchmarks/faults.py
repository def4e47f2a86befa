"""Counts the faults that a training run survives, and measures their cost: `uv run python -m benchmarks.faults`.

It trains the digits from RecordIO on two workers, first undisturbed, then with one fault after another. A fault kills,
stops or suspends a worker, the process that copies its samples for DALI, the launcher, or all of them. Then the same
command runs again. The seed determines the kind, the worker and the time of each fault. Some faults strike at any time
since the start, some while a checkpoint is written, most after a step of the plan.

A fault is survived if the job ends with the expected exit code, or goes on if it was only suspended; if no process
remains; and if the next start continues from the newest checkpoint that the fault found, or a newer one. At the end,
every variable of the last checkpoint, including those of optimizer and batch norm, and every row of metrics.jsonl,
except its times, must be bit-identical to the undisturbed run, and no other file may be left. Otherwise, or if a fault
was not survived, the exit code is 1.
"""
import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
from absl import app
from absl import flags as absl_flags

from plan.recipes import DIGITS
from tests.rigs import warm
from tests.rigs.trainings import PATIENCE, differences, newest_step, start, trainers, wait_for

TRAINING = ("--model=resnet20", "--image_size=16", "--checkpoint_every=0.2", "--deterministic")
MARGIN = 40  # number of last steps without faults
EARLY = 0.2  # fraction of the faults that may strike before the first step
GONE = 20  # seconds in which all processes of a job have to end
KILL, TERM, USR1, STOP, CONT = (getattr(signal, f"SIG{name}") for name in ("KILL", "TERM", "USR1", "STOP", "CONT"))
ANY, EITHER = "not 0", "1, unless training goes on"


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    target: worker, all (workers and launcher), launcher, or data: the process that copies a worker's samples. signals:
    sent one after another, with a pause. exit_code: expected from the launcher, ANY, None if training goes on, or
    EITHER: the samples may have been copied already.
    writing: whether it strikes while a checkpoint is being written. launcher: mpirun or horovodrun.
    """

    target: str
    signals: tuple[signal.Signals, ...]
    exit_code: int | str | None
    writing: bool = False
    launcher: str = "mpirun"

    @property
    def name(self) -> str:
        target = {"worker": "one worker", "all": f"all workers and {self.launcher}", "launcher": self.launcher,
                  "data": "a data process"}[self.target]
        under = " of horovodrun" if self.launcher == "horovodrun" and self.target in ("worker", "data") else ""
        return (f"{' and '.join(number.name for number in self.signals)}, {target}{under}"
                f"{', while writing a checkpoint' if self.writing else ''}")


KINDS = (
    Kind("worker", (KILL,), 128 + KILL),
    Kind("all", (KILL,), -KILL),
    Kind("all", (KILL,), -KILL, writing=True),
    Kind("worker", (TERM,), 75),
    Kind("worker", (USR1,), 75),
    Kind("worker", (STOP, CONT), None),
    Kind("worker", (STOP, KILL), 128 + KILL),
    Kind("launcher", (KILL,), -KILL),
    Kind("launcher", (TERM,), ANY),
    Kind("launcher", (STOP, CONT), None),
    Kind("worker", (KILL,), 1, launcher="horovodrun"),
    Kind("worker", (TERM,), 1, launcher="horovodrun"),
    Kind("worker", (STOP, CONT), None, launcher="horovodrun"),
    Kind("launcher", (KILL,), -KILL, launcher="horovodrun"),
    Kind("launcher", (TERM,), ANY, launcher="horovodrun"),
    Kind("launcher", (STOP, CONT), None, launcher="horovodrun"),
    Kind("data", (KILL,), EITHER),
    Kind("data", (TERM,), EITHER),
    Kind("data", (STOP, CONT), None),
    Kind("data", (STOP, KILL), EITHER, launcher="horovodrun"),
)


@dataclass(frozen=True)
class Fault:
    """A fault and its cost.

    step: of the plan, after which it struck, or None at any time since the start. problem: why it was not survived, or
    empty. steps_lost: steps since the last checkpoint of this start, if there is one, estimated from the time since
    then and the time of a step. ended: seconds until all processes had ended. resumed: seconds from the next
    start until a new checkpoint is written.
    """

    kind: Kind
    worker: int
    step: int | None
    problem: str
    steps_lost: float
    ended: float
    resumed: float = 0.0

    @property
    def survived(self) -> bool:
        return not self.problem


class Campaign:
    """A training that is struck again and again. See `campaign`."""

    def __init__(self, folder: Path, temporary: Path, workers: int, seed: int, flags, python: str):
        self.run, self._temporary, self._workers, self._flags = folder / "disturbed", temporary, workers, flags
        self._python, self._forks, self._random = python, Path(python).parent, random.Random(seed)

    def start(self, kind: Kind | None = None):
        """Starts the training under the launcher of a kind. Forks (tests/rigs/warm.py) do not end with a killed one."""
        launcher, is_cold = (kind.launcher, kind.target == "launcher" and KILL in kind.signals) if kind else (
            "mpirun", False)
        self._said = self._log.stat().st_size if self._log.exists() else 0
        self._reached = newest_step(self.run)
        return start(self.run, self._workers, self._flags, sys.executable if is_cold else self._python,
                     launcher=launcher, environment={"TMPDIR": str(self._temporary)})

    def strike(self, launcher, kind: Kind, step: int, step_seconds: float) -> Fault:
        """Waits until the fault is due, injects it, and waits for the end. step_seconds: time of a step."""
        worker, is_early = self._random.randrange(self._workers), self._random.random() < EARLY and not kind.writing
        if not is_early:
            wait_for(lambda: newest_step(self.run) >= max(step, self._reached + 1), launcher)
            time.sleep(self._random.random() / 2)
        if kind.writing:
            wait_for(lambda: any((self.run / "checkpoints").glob("step-*.part")), launcher, pause=0)
        struck = []
        wait_for(lambda: struck.extend(self._targets(launcher, kind, worker)) or struck, launcher)
        if is_early:
            time.sleep(2 * self._random.random())
        if launcher.poll() is not None:
            raise RuntimeError(f"the training run ended before the fault, with exit code {launcher.poll()}")
        processes, before = self._processes(launcher), newest_step(self.run)
        for number, signal_ in enumerate(kind.signals):
            time.sleep(self._random.random() * 1.5 if number else 0)
            for process in struck:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal_)
        struck_at, began, exit_code = time.time(), time.monotonic(), kind.exit_code
        if kind.exit_code in (None, EITHER):
            reached = newest_step(self.run)
            wait_for(lambda: newest_step(self.run) > reached + 6 or (launcher.poll() and kind.exit_code), launcher)
            exit_code = 1 if launcher.poll() else 0  # it may have come to its end
            for process in self._targets(launcher, replace(kind, target="worker"), 0):
                process.send_signal(TERM)
                exit_code = 75 if kind.launcher == "mpirun" else 1
        code = launcher.wait(PATIENCE)
        _, remaining = psutil.wait_procs(processes, timeout=GONE)
        for process in remaining:
            process.kill()
        if -KILL in (code, kind.exit_code):
            shutil.rmtree(self._temporary / f"ompi.{launcher.pid}", ignore_errors=True)  # a killed mpirun leaves it
        checkpoints = (self.run / "checkpoints").glob("step-*[0-9]")
        saved = max((path.stat().st_mtime for path in checkpoints), default=struck_at)
        lost = 0.0 if exit_code == 75 or before == self._reached else max(0.0, struck_at - saved) / step_seconds
        expected = (ANY,) if is_early and exit_code != -KILL else (exit_code,)
        is_expected = code in expected or (code != 0 and ANY in expected) or (code == 0 and kind.exit_code is None)
        problem = "" if is_expected else f"exit code {code} instead of {exit_code}; "
        if remaining:
            problem += f"not ended: {', '.join(map(str, remaining))}; "
        self._found = before
        return Fault(kind, worker, None if is_early else step, problem, lost, time.monotonic() - began)

    def resumed(self, launcher) -> tuple[float, str]:
        """Waits until a start has written a new checkpoint.

        Returns the seconds, and what is wrong if it has not continued from the newest one that the fault found.
        """
        began = time.monotonic()
        wait_for(lambda: newest_step(self.run) > self._reached, launcher)
        with open(self._log, errors="replace") as log:
            log.seek(self._said)
            steps = [int(step) for step in re.findall(r"resumed after step (\d+) of", log.read())]
        return time.monotonic() - began, "" if max(steps, default=0) >= self._found else (
            f"resumed after step {steps}, though there was a checkpoint of step {self._found}; ")

    def left(self, undisturbed: Path) -> list[str]:
        """Returns the files that are left of the training that has ended.

        Which steps have a checkpoint depends on how fast the disk is.
        """
        ours, theirs = ({re.sub(r"step-\d+", "step-N", str(path.relative_to(run))) for path in run.rglob("*")
                         if "tensorboard" not in path.parts} for run in (self.run, undisturbed))
        return [f"left: {path}" for path in (*sorted(ours - theirs), *self._temporary.iterdir())]

    def kill(self, launcher) -> None:
        """Kills a training that is not to go on."""
        if launcher.poll() is None:
            for process in (*self._processes(launcher), launcher):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            launcher.wait()

    @property
    def _log(self) -> Path:
        return Path(f"{self.run}.log")

    def _real(self, process: psutil.Process) -> psutil.Process:
        """Returns the process that a stand-in stands for (tests/rigs/warm.py), or the process itself."""
        stood_for = self._forks / str(process.pid)
        return psutil.Process(warm.child(self._forks, process.pid)) if stood_for.exists() else process

    def _targets(self, launcher, kind: Kind, worker: int) -> list[psutil.Process]:
        """Returns the processes to strike, or none as long as a worker is missing."""
        with contextlib.suppress(psutil.Error):
            workers = [self._real(process) for process in trainers(launcher)]
            if len(workers) == self._workers:
                return {
                    "worker": lambda: [workers[worker]],
                    "launcher": lambda: [psutil.Process(launcher.pid)],
                    "all": lambda: [psutil.Process(launcher.pid), *workers],
                    "data": lambda: [self._real(child) for child in workers[worker].children(recursive=True)
                                     if "data.staging.spool_writer" in child.cmdline()],
                }[kind.target]()
        return []

    def _processes(self, launcher) -> list[psutil.Process]:
        """Returns all processes of a job except the launcher, and the forks that some of them stand for."""
        processes, new = [], [psutil.Process(launcher.pid)]
        while new:
            processes += new
            children = [child for process in new for child in _children(process)]
            new = [*dict.fromkeys([*children, *map(self._real, children)])]
        return processes[1:]


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def campaign(folder: Path, faults: int, workers: int, seed: int, flags=TRAINING, python=sys.executable, kinds=KINDS
             ) -> tuple[list[Fault], list[str]]:
    """Returns (the faults, how the disturbed training differs from the undisturbed one).

    python: interpreter of the workers. Those whose launcher is killed have this program's. kinds: each has the same
    number of faults, or one more.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    flags = (*flags, f"--epochs={max(8, 2 * faults)}")  # an epoch has eleven steps
    undisturbed, rng = folder / "undisturbed", random.Random(seed)
    chosen = [kind for _ in range(-(-faults // len(kinds))) for kind in rng.sample(kinds, len(kinds))][:faults]
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as temporary:  # a short name, for Open MPI's sockets
        disturbed = Campaign(folder, Path(temporary), workers, seed, flags, python)
        launcher = start(undisturbed, workers, flags, python)
        try:
            if launcher.wait(4 * PATIENCE):
                raise RuntimeError(f"the undisturbed training failed; see {undisturbed}.log")
            steps = json.loads((undisturbed / "plan.json").read_text())["steps"]
            step_seconds = json.loads((undisturbed / "summary.json").read_text())["seconds"] / steps
            launcher = disturbed.start(chosen[0])
            struck = []
            for number, step in enumerate(sorted(rng.choices(range(steps - MARGIN), k=faults)), 1):
                fault = disturbed.strike(launcher, chosen[number - 1], step, step_seconds)
                launcher = disturbed.start(chosen[number] if number < faults else None)
                seconds, problem = disturbed.resumed(launcher)
                struck.append(replace(fault, problem=fault.problem + problem, resumed=seconds))
                when = "early" if fault.step is None else f"after step {step}"
                print(f"{number}. {fault.kind.name}, worker {fault.worker}, {when}: {struck[-1].problem or 'survived'}",
                      file=sys.stderr, flush=True)
            if launcher.wait(4 * PATIENCE):
                return struck, [f"the last part of the disturbed training failed; see {folder}/disturbed.log"]
            return struck, differences(undisturbed, disturbed.run) + disturbed.left(undisturbed)
        finally:
            disturbed.kill(launcher)


def table(faults: list[Fault]) -> str:
    lines = ["| fault | injected | survived | steps lost, mean (max) | seconds to exit, max | to resume, mean |",
             "| --- | --- | --- | --- | --- | --- |"]
    for kind in dict.fromkeys(fault.kind for fault in faults):
        of_kind = [fault for fault in faults if fault.kind == kind]
        lost, ended, resumed = (np.array([getattr(fault, name) for fault in of_kind])
                                for name in ("steps_lost", "ended", "resumed"))
        lines.append(f"| {kind.name} | {len(of_kind)} | {sum(fault.survived for fault in of_kind)} | "
                     f"{lost.mean():.1f} ({lost.max():.1f}) | {ended.max():.1f} | {resumed.mean():.1f} |")
    return "\n".join(lines)


def main(argv) -> int:
    del argv
    values = absl_flags.FLAGS
    folder = Path(values.output_dir).absolute()
    dataset = folder.with_name(f"{folder.name}_digits")  # of files, whose samples another process copies
    shutil.rmtree(dataset, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "data.prepare", "--source=digits", "--format=recordio",
                    f"--output={dataset}"], check=True, stdout=sys.stderr)
    faults, differing = campaign(folder, values.faults, values.workers, values.seed,
                                 flags=(f"--flagfile={DIGITS}", f"--data_dir={dataset}", *TRAINING))
    print(table(faults))
    same = f"differs in {len(differing)}: {', '.join(differing[:5])}" if differing else "is bit-identical"
    print(f"{len(faults)} faults, {sum(fault.survived for fault in faults)} survived; the result {same}")
    return int(bool(differing) or not all(fault.survived for fault in faults))


if __name__ == "__main__":
    absl_flags.DEFINE_integer("faults", 32, "Number of faults.", lower_bound=1)
    absl_flags.DEFINE_integer("workers", 2, "Number of workers.", lower_bound=1)
    absl_flags.DEFINE_integer("seed", 0, "Seed of the kinds, workers and times of the faults.")
    absl_flags.DEFINE_string("output_dir", "runs/faults", "Folder for the two runs.")
    app.run(main)
