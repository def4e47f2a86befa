"""Measures a machine with NVIDIA GPUs in about an hour: launch/first_gpu_hour.sh [flags]

It runs these steps one after another, each with a time limit, and continues after a failure:

    checks      nvidia-smi, the topology, the build of Horovod, launch.preflight on all GPUs
    tests       pytest -m gpu
    placement   the operations of a training step that do not run on the GPU
    speed       ResNet-50 on a batch that stays on the device: micro-batches, precisions, with and without XLA
    data        ResNet-50 on images that DALI decodes, on the CPU and on the GPU
    update      the share of a training step that LARS's update takes
    exchange    training on all GPUs: ring, torus, float16, timeline
    stop        stops a run with SIGUSR1, resumes it, and compares it bit for bit with an undisturbed run

The output of each step goes to OUTPUT_DIR/NN-STEP.log. The results go to first_hour.json, which is updated after each
command, and to the page first_hour.html, next to published results. The exit code is 0 if all steps succeeded, else 1.
"""
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import psutil

from common import command, flags
from common.errors import UserError
from common.files import write_json
from common.flags import flag
from data.named import absolute
from distributed import gpus
from distributed.launcher import end_with_parent
from launch import facts
from launch.first_hour_steps import NAMES, ROOT, Command, Machine, Step, steps
from reporting.first_hour import write_first_hour

PUBLISHED = Path(__file__).parent / "published_gpus.json"
OUT_OF_MEMORY = ("oom when allocating", "out of memory", "resource_exhausted", "resourceexhausted")
NOT_FAILED = ("ok", "skipped", "out of memory")  # outcomes of commands; the last one shows what fits, and is no failure


def names(texts: list[str]) -> tuple[str, ...]:
    """Parses the value of --only. Raises ValueError."""
    if unknown := [text for text in texts if text not in NAMES]:
        raise ValueError(f"there is no step '{unknown[0]}'; the steps are {', '.join(NAMES)}")
    return tuple(texts)


@dataclass(frozen=True)
class Options:
    """This command's flags.

    output_dir: Folder for the logs, first_hour.json and first_hour.html.
    data_dir: Dataset for the step `data`. The images of the default, digits, are too small to measure decoding.
    pretend: Run all steps on CPUs with tiny sizes, to test the script. The numbers mean nothing.
    only: Steps to run, such as speed,data. Default: all.
    """

    output_dir: str = "runs/first_gpu_hour"
    data_dir: str = "digits"
    pretend: bool = False
    only: tuple[str, ...] = flag([], parse=names)


def run_command(asked: Command, log: Path, limit: float, environment: dict[str, str]) -> dict:
    """Runs a command in its own process group, appends its output to the log, and returns its row.

    The command and all its descendants are killed at the limit, and when this process is interrupted.
    """
    if asked.skip:
        return asked.label | {"outcome": "skipped", "seconds": 0.0, "note": asked.skip}
    if limit <= 0:
        return asked.label | {"outcome": "not run", "seconds": 0.0, "note": "the step ran out of time"}
    with open(log, "ab") as file:
        file.write(f"$ {shlex.join(asked.words)}\n".encode())
        file.flush()
        begun, start = time.monotonic(), file.tell()
        try:
            process = subprocess.Popen(asked.words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT,
                                       env=os.environ | environment, start_new_session=True,
                                       preexec_fn=partial(end_with_parent, signal.SIGKILL))
        except OSError as error:
            return asked.label | {"outcome": "failed", "seconds": 0.0, "note": f"{asked.words[0]}: {error.strerror}"}
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    with open(log, "rb") as file:
        file.seek(start)
        output = file.read().decode(errors="replace")
    return asked.label | judged(asked, code, output, limit) | {"seconds": time.monotonic() - begun}


def judged(asked: Command, code: int | None, output: str, limit: float) -> dict:
    """Returns the outcome of a command. code: its exit code, or None if it was killed at its limit."""
    last_lines = own_lines(output)[-20:]
    if code is None:
        return {"outcome": "failed", "note": f"killed after {limit:.0f} s"}
    if code and asked.may_not_fit and any(words in line.lower() for words in OUT_OF_MEMORY for line in last_lines):
        return {"outcome": "out of memory", "note": ""}
    if code:
        return {"outcome": "failed", "note": f"exit code {code}: {last_lines[-1][:300] if last_lines else 'no output'}"}
    try:
        return {"outcome": "ok", "note": "", **asked.read(output)}
    except UserError as error:
        return {"outcome": "failed", "note": str(error)}
    except (OSError, ValueError, KeyError, IndexError) as error:
        return {"outcome": "failed", "note": f"its output cannot be read: {type(error).__name__} {error}"}


def own_lines(output: str) -> list[str]:
    """Returns the non-empty lines of an output, without the box in which mpirun reports a failed worker."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    box = next((index for index, line in enumerate(lines) if index and set(line) == {"-"}), len(lines))
    return lines[:box]


def end(process: subprocess.Popen) -> None:
    """Kills a process, its group and its descendants, because mpirun gives each worker its own group."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    for kill in (partial(os.killpg, process.pid, signal.SIGKILL), *(one.kill for one in family)):
        try:
            kill()
        except (ProcessLookupError, psutil.Error):
            continue
    process.wait()


def run_steps(chosen: list[Step], folder: Path, result: dict, environment: dict[str, str]) -> list[str]:
    """Runs the steps, updates first_hour.json and the page on the way, and returns the names of failed steps."""
    result["steps"] = []
    for step in chosen:
        log, begun, rows = folder / f"{number(step.name):02d}-{step.name}.log", time.monotonic(), []
        log.write_bytes(b"")
        row = {"name": step.name, "title": step.title, "outcome": "under way", "seconds": 0.0, "log": log.name,
               "rows": rows}
        result["steps"].append(row)
        for asked in step.commands:
            left = step.limit - (time.monotonic() - begun)
            rows.append(run_command(asked, log, min(asked.limit, left), environment))
            row["seconds"] = time.monotonic() - begun
            print_row(step.name, rows[-1])
            write_json(folder / "first_hour.json", result)
        row["outcome"] = outcome(rows)
        write_json(folder / "first_hour.json", result)
        write_first_hour(folder, result, json.loads(PUBLISHED.read_text()))
    return [row["name"] for row in result["steps"] if row["outcome"] == "failed"]


def number(name: str) -> int:
    """Returns the number of a step's log; 0 for a step that is not in NAMES."""
    return NAMES.index(name) + 1 if name in NAMES else 0


def outcome(rows: list[dict]) -> str:
    """Returns the outcome of a step: ok, skipped or failed."""
    found = [row["outcome"] for row in rows]
    if all(one == "skipped" for one in found):
        return "skipped"
    return "ok" if "ok" in found and all(one in NOT_FAILED for one in found) else "failed"


def print_row(name: str, row: dict) -> None:
    """Prints a row as one line on standard error."""
    details = ", ".join(f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
                     for key, value in row.items() if key != "outcome" and value not in ("", None))
    print(f"{name}: {row['outcome']}: {details}", file=sys.stderr, flush=True)


def machine_facts(pretend: bool) -> dict:
    """Returns the facts of this machine for the page."""
    found = [] if pretend else gpus.visible()
    versions = {title: facts.version(facts.PACKAGES[title.lower()]) for title in ("TensorFlow", "Horovod", "DALI")}
    return {"host": os.uname().nodename, "GPUs": len(found), "GPU": found[0].name if found else "none",
            "memory": f"{found[0].memory:.0f} GiB" if found else "", "driver": found[0].driver if found else "",
            "cores": len(os.sched_getaffinity(0)), **versions, "bigbatch": facts.source(),
            "started": f"{datetime.now():%Y-%m-%d %H:%M}"}


def run(options: Options) -> None:
    """Runs the chosen steps. Raises UserError if a step failed."""
    found = [] if options.pretend else gpus.visible()
    if not found and not options.pretend:
        raise UserError("nvidia-smi lists no GPU on this machine; use --pretend to try all steps on CPUs")
    folder = Path(options.output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    machine = Machine(len(found), min((gpu.memory for gpu in found), default=0.0), options.pretend)
    chosen = [step for step in steps(machine, folder, absolute(options.data_dir))
              if step.name in (options.only or NAMES)]
    failed = run_steps(chosen, folder, {"pretend": options.pretend, "machine": machine_facts(options.pretend)},
                       machine.environment)
    print(f"page: {folder / 'first_hour.html'}", file=sys.stderr)
    if failed:
        raise UserError(f"these steps failed: {', '.join(failed)}; see their logs in {folder}")


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    if command.asks_for_help(argv):
        command.print_help(__doc__, *flags.described(flags.define(Options), flags.names(Options)))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kills the running command first
    with command.shell("first_hour") as ending:
        run(flags.parsed(flags.read(flags.define(Options), argv), Options))
    return ending.code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
