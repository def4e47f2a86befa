"""Measures a machine with NVIDIA GPUs in about an hour: launch/first_gpu_hour.sh [flags]

It runs the commands of these steps one after another, each with a time limit, and continues after a failure:

    checks      nvidia-smi, the topology, launch.preflight on all GPUs
    tests       pytest -m gpu: training, placement of operations, stop and resume bit for bit, NCCL, XLA, precisions
    speed       ResNet-50 on resident data: micro-batches, precisions, with and without XLA
    data        ResNet-50 on images that DALI decodes, on the CPU and on the GPU
    update      the time of LARS's update of ResNet-50, next to that of Keras's SGD
    exchange    ResNet-50 on one GPU and on all: ring, torus, float16

The output of each step goes to OUTPUT_DIR/STEP.log. The results go to first_hour.json, which is updated after each
command, and to the page first_hour.html, next to published results. The exit code is 0 if no command failed, else 1.
"""
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from reporting.first_hour import write_first_hour

PUBLISHED = Path(__file__).parent / "published_gpus.json"
OUT_OF_MEMORY = re.compile("oom when allocating|out of memory|resource_?exhausted", re.IGNORECASE)
LIMITS = {"checks": 300, "tests": 600, "speed": 1500, "data": 480, "update": 240, "exchange": 600}  # seconds of a step
LIMIT = 240.0  # seconds of a command of a step with several
LARGE_MEMORY = 30.0  # GiB; ResNet-50 in mixed precision fits 256 images per step
PERSISTENT = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"  # lets TensorFlow fuse float16 batch norm, see docs/gpu.md
PRETENDED = ["tests/test_gpu.py", "-k", "a_step_changes_every_weight"]  # of pytest
COLUMNS = ("images_per_second", "step_seconds", "compute", "data", "exchange", "grid")  # from the benchmark's rows


def steps(texts: list[str]) -> tuple[str, ...]:
    """Parses the value of --only. Raises ValueError."""
    if unknown := [text for text in texts if text not in LIMITS]:
        raise ValueError(f"there is no step '{unknown[0]}'; the steps are {', '.join(LIMITS)}")
    return tuple(texts)


@dataclass(frozen=True)
class Options:
    """This command's flags.

    output_dir: Folder for the logs, first_hour.json and first_hour.html.
    data_dir: Dataset for the step `data`. The images of the default, digits, are too small to measure decoding.
    pretend: Run one command of each step on CPUs with tiny sizes, to test the script. The numbers mean nothing.
    only: Steps to run, such as speed,data. Default: all.
    """

    output_dir: str = "runs/first_gpu_hour"
    data_dir: str = "digits"
    pretend: bool = False
    only: tuple[str, ...] = flag([], parse=steps)


@dataclass(frozen=True)
class Command:
    """A command, whose result is a row. label: the row's first columns."""

    step: str
    label: dict
    words: list[str]


def commands(workers: int, memory: float, data_dir: str) -> Iterator[Command]:
    """Yields the commands for a machine. workers: its GPUs. memory: of the smallest one, in GiB."""
    large = 256 if memory >= LARGE_MEMORY else 128
    yield Command("checks", {"check": "nvidia-smi"}, ["nvidia-smi"])
    yield Command("checks", {"check": "topology"}, ["nvidia-smi", "topo", "-m"])
    yield Command("checks", {"check": "preflight"}, on_workers(workers, "launch.preflight", f"--data_dir={data_dir}"))
    yield Command("tests", {"tests": "pytest -m gpu"},
                  python("pytest", "-m", "gpu", "-o", "addopts=--import-mode=importlib", "-rs"))
    fused = training("speed", 1, large, "mixed_float16", xla="false")
    yield replace(fused, label=fused.label | {"batch norm": "persistent"},
                  words=["env", f"{PERSISTENT}=1", *fused.words])
    for precision in ("mixed_float16", "float32", "mixed_bfloat16"):
        for size in (64, 128, 256):
            for xla in ("false", "true", *(("auto",) if precision == "mixed_float16" and size == large else ())):
                yield training("speed", 1, size, precision, xla=xla)
    for device, load in (("cpu", None), ("gpu", 0), ("gpu", 0.65), ("gpu", 0.9)):
        decoder = {"dali_device": device} | ({} if load is None else {"hw_decoder_load": load})
        yield Command("data", {"hw_decoder_load": ""} | decoder, python(
            "experiments.benchmark", f"--data_dir={data_dir}", "--model=resnet50", f"--micro_batch_size={large}",
            "--precision=mixed_float16", "--seconds=8", "--json", *given(decoder)))
    yield Command("update", {"model": "resnet50"}, python("benchmarks.optimizer_step"))
    if workers > 1:
        for number, allreduce, compression in ((1, "ring", "none"), (workers, "ring", "none"),
                                               (workers, "torus", "none"), (workers, "ring", "fp16")):
            yield training("exchange", number, large, "mixed_float16", allreduce=allreduce, compression=compression)


def training(step: str, workers: int, size: int, precision: str, **more) -> Command:
    """Returns the command that measures training steps on resident data. size: of a micro-batch. more: other flags."""
    batch = workers * size
    words = ["--model=resnet50", f"--data_dir=synthetic:{8 * batch}", f"--global_batch_size={batch}",
             f"--micro_batch_size={size}", f"--precision={precision}", "--seconds=5", "--json", *given(more)]
    label = {"workers": workers, "precision": precision, "micro_batch_size": size} | more
    return Command(step, label, on_workers(workers, "experiments.benchmark", *words))


def pretended(data_dir: str) -> Iterator[Command]:
    """Yields the last command of each step, for two workers and with sizes for CPUs."""
    tiny = {"--model=resnet50": "--model=convnet", "--dali_device=gpu": "--dali_device=cpu",
            "--seconds=5": "--seconds=0.05", "--seconds=8": "--seconds=0.05",
            "--precision=mixed_float16": "--precision=float32"}  # CPUs are slow at float16
    for last in {one.step: one for one in commands(2, 0.0, data_dir)}.values():
        words = [tiny.get(word, re.sub(r"(batch_size=|synthetic:)\d+", r"\g<1>32", word)) for word in last.words]
        more = {"tests": PRETENDED, "update": ["--model=convnet", "--rounds=1"]}
        yield Command(last.step, last.label, words + more.get(last.step, []))


def given(values: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def python(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


def on_workers(workers: int, *words: str) -> list[str]:
    """Returns the command that runs a module on `workers` workers, as launch/dgx1.sh does."""
    bound = ["mpirun", "--bind-to", "none", "-np", str(workers), *python("launch.binding")]
    return [*(bound if workers > 1 else []), *python(*words)]


def measured(step: str, output: str) -> dict:
    """Returns columns from the output of a step's command. Raises ValueError, LookupError if it has none."""
    if step == "tests":
        return {"result": re.findall(r"=+ (.*\d+ passed.*) in [\d.]+s", output)[-1]}
    if step == "update":
        return {f"{name}, ms": float(time) for name, time in re.findall(r"^(\S.*?) +([\d.]+) ms ", output, re.M)}
    if step == "checks":
        return {}
    result = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    if step == "data":
        return {row["name"]: row["images_per_second"] for row in result["stages"]} | {"limit": result["limit"]}
    return {name: result["rows"][0][name] for name in COLUMNS}


def run_command(asked: Command, log: Path, limit: float) -> dict:
    """Runs a command, appends its output to the log, and returns its row.

    The command and all its descendants are killed at the limit, and when this process is interrupted.
    """
    row = {"step": asked.step, **asked.label, "outcome": "failed", "note": "", "seconds": 0.0}
    begun = time.monotonic()
    code = None
    with open(log, "ab") as file:
        file.write(f"$ {shlex.join(asked.words)}\n".encode())
        file.flush()
        start = file.tell()
        try:
            process = subprocess.Popen(asked.words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=facts.ROOT,
                                       start_new_session=True, preexec_fn=partial(end_with_parent, signal.SIGKILL))
        except OSError as error:
            return row | {"note": f"{asked.words[0]}: {error.strerror}"}
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            row["note"] = f"killed after {limit:.0f} s"
        finally:
            kill(process)
    row["seconds"] = time.monotonic() - begun
    output = log.read_bytes()[start:].decode(errors="replace")
    if code == 0:
        try:
            return row | measured(asked.step, output) | {"outcome": "ok"}
        except (ValueError, LookupError, TypeError) as error:
            row["note"] = f"its output cannot be read: {type(error).__name__} {error}"
    elif code is not None and asked.step in ("speed", "data") and OUT_OF_MEMORY.search(output):
        row["outcome"] = "out of memory"  # shows what fits, and is no failure
    elif code is not None:
        row["note"] = f"exit code {code}: {last_line(output)}"
    return row


def last_line(output: str) -> str:
    """Returns the last line that is not in the box in which mpirun reports a failed worker."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    box = next((number for number, line in enumerate(lines) if number and set(line) == {"-"}), len(lines))
    return lines[box - 1][:300] if lines else "no output"


def kill(process: subprocess.Popen) -> None:
    """Kills a process and its descendants, whose groups differ: mpirun gives each worker its own."""
    if process.poll() is None:
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def run_all(asked: list[Command], folder: Path, result: dict, limits: dict[str, float]) -> list[str]:
    """Runs the commands and returns the names of failed steps.

    Adds a row per command to result["rows"], and writes first_hour.json and the page after each. limits: seconds by
    step, for all its commands.
    """
    left = dict(limits)
    published = json.loads(PUBLISHED.read_text())
    for one in asked:
        limit = min(left[one.step], LIMIT) if sum(other.step == one.step for other in asked) > 1 else left[one.step]
        if limit > 0:
            row = run_command(one, folder / f"{one.step}.log", limit)
        else:
            row = {"step": one.step, **one.label, "outcome": "not run", "note": "no time was left", "seconds": 0.0}
        left[one.step] -= row["seconds"]
        result["rows"].append(row)
        write_json(folder / "first_hour.json", result)
        write_first_hour(folder, result, published)
        print(", ".join(f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}"
                        for name, value in row.items() if value != ""), file=sys.stderr, flush=True)
    failed = [row["step"] for row in result["rows"] if row["outcome"] in ("failed", "not run")]
    return [step for step in LIMITS if step in failed]


def run(options: Options) -> None:
    """Runs the chosen steps. Raises UserError if one failed."""
    found = [] if options.pretend else gpus.visible()
    if not found and not options.pretend:
        raise UserError("nvidia-smi lists no GPU on this machine; use --pretend to try all steps on CPUs")
    data_dir = absolute(options.data_dir)
    folder = Path(options.output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if options.pretend:
        os.environ |= {"BIGBATCH_PRETEND_GPU": "1", "CUDA_VISIBLE_DEVICES": ""}
        every = pretended(data_dir)
    else:
        every = commands(len(found), min(gpu.memory for gpu in found), data_dir)
    chosen = [one for one in every if one.step in (options.only or LIMITS)]
    for step in LIMITS:
        (folder / f"{step}.log").unlink(missing_ok=True)
    machine = facts.gather(data_dir, options.output_dir, "cpu" if options.pretend else "auto")
    failed = run_all(chosen, folder, {"pretend": options.pretend, "machine": machine, "rows": []}, LIMITS)
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
