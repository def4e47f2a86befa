"""The steps of launch.first_hour: the commands of each, their time limits, and the parsers of their output."""
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UserError
from launch.first_hour_probe import MARK
from reporting.run_folder import METRICS, PLAN, SUMMARY, TIMES, RunFolder

ROOT = Path(__file__).parents[1]
LARGE_MEMORY = 30.0  # GiB; ResNet-50 in mixed precision fits 256 images per step
PLACED = re.compile(r"placer\.cc:\d+\] (\S+): \((\w+)\): \S*device:([A-Z_]+):\d+")
# Operations that may run on the CPU of a machine with GPUs, and why. int32 constants and shapes, which live in host
# memory, are still placed on the GPU: they are GPU operations that declare their output to be in host memory.
HOST_ONLY = {
    "PyFunc": "a call of Python: the clock of training.breakdown",
    "_Arg": "no computation: placed where the caller has the tensor",
    "_Retval": "no computation: placed where the caller needs the tensor",
    "NoOp": "no computation: orders others",
}
NAMES = ("checks", "tests", "placement", "speed", "data", "update", "exchange", "stop")


@dataclass(frozen=True)
class Command:
    """A command of a step, one row of its table.

    label: the row's first columns. words: the command line. limit: seconds. read: returns the row's other columns from
    the command's output, and raises UserError if the output shows an error. skip: why it does not apply. may_not_fit:
    whether running out of GPU memory is a valid result.
    """

    label: dict
    words: list[str] = field(default_factory=list)
    limit: float = 120.0
    read: Callable[[str], dict] = lambda output: {}
    skip: str = ""
    may_not_fit: bool = False


@dataclass(frozen=True)
class Step:
    """A step of launch.first_hour. limit: seconds for all of its commands."""

    name: str
    title: str
    limit: float
    commands: list[Command]


@dataclass(frozen=True)
class Machine:
    """The machine to measure. memory: of the smallest GPU, in GiB. pretend: use CPUs and tiny sizes."""

    gpus: int
    memory: float = 0.0
    pretend: bool = False

    @property
    def workers(self) -> int:
        return 2 if self.pretend else self.gpus

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the commands get in addition to this process's environment."""
        paths = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        return paths | ({"BIGBATCH_PRETEND_GPU": "1", "CUDA_VISIBLE_DEVICES": ""} if self.pretend else {})

    @property
    def model(self) -> list[str]:
        return ["--model=convnet", "--image_size=32"] if self.pretend else ["--model=resnet50", "--image_size=224"]

    @property
    def micro_batch(self) -> int:
        """A size that fits, for steps that measure only one."""
        return 8 if self.pretend else 256 if self.memory >= LARGE_MEMORY else 128

    @property
    def precision(self) -> str:
        return "float32" if self.pretend else "mixed_float16"


def steps(machine: Machine, folder: Path, data_dir: str) -> list[Step]:
    """Returns all steps in order. folder: the output folder; training runs write to its subfolder trainings."""
    return [checks(machine, data_dir), tests(machine), placement(machine), speed(machine), data(machine, data_dir),
            update(machine), exchange(machine, folder), stop(machine, folder)]


def python(*words) -> list[str]:
    return [sys.executable, *map(str, words)]


def mpirun(workers: int, *words) -> list[str]:
    """Returns the command that runs a Python program on `workers` workers, as launch/dgx1.sh does."""
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(workers),
            *python("-m", "launch.binding", *python(*words))]


def checks(machine, data_dir) -> Step:
    no_gpu = "--pretend uses no GPU" if machine.pretend else ""
    return Step("checks", "This machine", 420, [
        Command({"check": "nvidia-smi"}, ["nvidia-smi"], 60, skip=no_gpu),
        Command({"check": "topology"}, ["nvidia-smi", "topo", "-m"], 60, skip=no_gpu),
        Command({"check": "Horovod's build"}, ["horovodrun", "--check-build"], 120,
                lambda output: {"found": built(output, nccl=machine.gpus > 1)}),
        Command({"check": "preflight on all GPUs"},
                mpirun(machine.workers, "-m", "launch.preflight", f"--data_dir={data_dir}"), 300)])


def built(output: str, nccl: bool) -> str:
    """Returns the libraries that Horovod is built with. Raises UserError if NCCL is needed and missing."""
    found = re.findall(r"\[X\] (\w+)", output)
    if nccl and "NCCL" not in found:
        raise UserError("Horovod is built without NCCL, which several GPUs need; see docs/gpu.md for how to build it")
    return " ".join(dict.fromkeys(found))


def tests(machine) -> Step:
    files = ["tests/test_gpu.py"] if machine.pretend else []  # other tests need a real GPU
    words = python("-m", "pytest", "-m", "gpu", "-o", "addopts=--import-mode=importlib", "-rs", "-v", *files)
    return Step("tests", "The tests that need a GPU", 480, [Command({"tests": "pytest -m gpu"}, words, 480, summary)])


def summary(output: str) -> dict:
    """Returns pytest's last line: the numbers of passed, failed and skipped tests."""
    return {"result": re.findall(r"=+ (.*\d+ passed.*) in [\d.]+s", output)[-1]}


def placement(machine) -> Step:
    words = python("-m", "launch.first_hour_probe", "placement", *trained_as(machine), "--batch_size=8")
    wanted = "CPU" if machine.pretend else "GPU"
    return Step("placement", "Where the operations of a training step run", 180, [
        Command({"step of": machine.model[0].partition("=")[2]}, words, 180,
                lambda output: placed(output, wanted))])


def placed(output: str, wanted: str) -> dict:
    """Returns columns from TensorFlow's log. Raises UserError for operations elsewhere that are not in HOST_ONLY."""
    found = placements(output)
    if not found:
        raise UserError("TensorFlow's log contains no operation of the step")
    allowed, offenders = ({op: count for (op, device), count in sorted(found.items())
                           if device != wanted and (op in HOST_ONLY) == known} for known in (True, False))
    if offenders:
        raise UserError(f"operations not on the {wanted}: {listed(offenders)}")
    on = sum(count for (_, device), count in found.items() if device == wanted)
    return {f"operations on the {wanted}": on, "elsewhere, as they must be": listed(allowed) or "none"}


def listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{op} ({count})" for op, count in counts.items())


def placements(output: str) -> Counter:
    """Counts (operation type, device type) in the placer's lines after the mark at the start of the step.

    TensorFlow also prints the same lines to standard output, without the file name, at any time.
    """
    return Counter((op, device) for _, op, device in {
        match.groups() for match in PLACED.finditer(output.partition(MARK)[2])})


def trained_as(machine) -> list[str]:
    """Returns train.py's flags for the probes, which train on a batch that stays on the device."""
    return [*machine.model, "--data_dir=synthetic:1000", "--optimizer=lars", "--weight_decay=5e-5",
            f"--precision={machine.precision}"]


def speed(machine) -> Step:
    batches = (8,) if machine.pretend else (64, 128, 256)
    precisions = ("float32", "mixed_bfloat16") if machine.pretend else ("mixed_float16", "float32", "mixed_bfloat16")
    seconds = 0.05 if machine.pretend else 2.0
    rows = []
    for precision in precisions:
        for batch in batches:
            for xla in ("false", "true", *(("auto",) if (precision, batch) == ("mixed_float16", 256) else ())):
                words = benchmark(machine, "digits", batch, seconds, f"--precision={precision}", f"--xla={xla}",
                                  "--dali_device=cpu")
                rows.append(Command({"precision": precision, "micro_batch_size": batch, "xla": xla}, words, 240,
                                    lambda output: {"images_per_second": rates(output)["model"]}, may_not_fit=True))
    return Step("speed", "Training on a batch that stays on the device", 1500, rows)


def benchmark(machine, data_dir, batch, seconds, *more) -> list[str]:
    return python("-m", "experiments.benchmark", f"--data_dir={data_dir}", *machine.model, f"--batch_size={batch}",
                  f"--seconds={seconds}", "--json", *more)


def rates(output: str) -> dict[str, float]:
    """Returns images per second by stage, from the output of experiments.benchmark."""
    return {row["name"]: row["images_per_second"] for row in last_json(output)["stages"]}


def last_json(output: str) -> dict:
    """Parses the last line that is a JSON object. Raises IndexError if there is none."""
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


def data(machine, data_dir) -> Step:
    loads = [("cpu", None)] + [("cpu" if machine.pretend else "gpu", load) for load in (0, 0.65, 0.9)]
    rows = []
    for device, load in loads[:2] if machine.pretend else loads:
        flags = [f"--dali_device={device}", *([] if load is None else [f"--hw_decoder_load={load}"])]
        words = benchmark(machine, data_dir, machine.micro_batch, 0.05 if machine.pretend else 8.0,
                          f"--precision={machine.precision}", *flags)
        rows.append(Command({"DALI on": device, "hw_decoder_load": "" if load is None else load}, words, 240,
                            stages, may_not_fit=True))
    return Step("data", "Training on images that DALI decodes", 480, rows)


def stages(output: str) -> dict:
    found = rates(output)
    return {"read, images/s": found["read"], "decoded": found["decode"], "whole pipeline": found["pipeline"],
            "model alone": found["model"], "training": found["train"], "limit": last_json(output)["limit"]}


def update(machine) -> Step:
    rounds = 2 if machine.pretend else 15
    words = python("-m", "launch.first_hour_probe", "update", f"--rounds={rounds}", *trained_as(machine),
                   f"--batch_size={machine.micro_batch}")
    return Step("update", "The share of a training step that LARS's update takes", 240, [
        Command({"model": machine.model[0].partition("=")[2], "micro_batch_size": machine.micro_batch}, words, 240,
                last_json)])


def exchange(machine, folder: Path) -> Step:
    """Measures one GPU alone first, as the reference for the efficiency of the others."""
    skip_reason = "a single GPU has nothing to exchange" if machine.workers == 1 else ""
    timeline = folder / "timeline.json"
    kinds = {"one GPU alone": (1, []), "ring": (machine.workers, []), "torus": (machine.workers, ["--allreduce=torus"]),
             "ring, float16": (machine.workers, ["--compression=fp16"]),
             "ring, timeline": (machine.workers, [f"--timeline={timeline}"])}
    rows = []
    for kind, (workers, flags) in kinds.items():
        run = folder / "trainings" / re.sub(r"\W+", "-", kind)
        batch, updates = workers * machine.micro_batch, 4 if machine.pretend else 40
        words = mpirun(workers, ROOT / "train.py", *machine.model, f"--data_dir=synthetic:{updates * batch}",
                       "--optimizer=lars", "--learning_rate=0.1", "--lr_scaling=none",
                       f"--precision={machine.precision}", f"--batch_size={batch}",
                       f"--micro_batch_size={machine.micro_batch}", "--epochs=3", "--checkpoint_every=1000",
                       "--resume=never", f"--output_dir={run}", *flags)
        written = timeline if "timeline" in kind else run / SUMMARY
        rows.append(Command({"exchange": kind, "workers": workers, "precision": machine.precision,
                             "micro_batch_size": machine.micro_batch}, words, 150,
                            lambda output, run=run, written=written: exchanged(run, written), skip_reason))
    return Step("exchange", "Training on all GPUs", 600, rows)


def exchanged(run: Path, written: Path) -> dict:
    """Returns columns of a training run on resident data, from its last epoch, because the first one compiles.

    written: a file that must not be empty. Raises UserError if it is missing or empty.
    """
    if not written.is_file() or not written.stat().st_size:
        raise UserError(f"{written} is missing or empty")
    folder = RunFolder(run, reader="launch.first_hour")
    [*_, rate], [*_, times] = folder.rows(METRICS), folder.rows(TIMES)
    took, waits = folder.read(PLAN)["exchange"], times.get("exchange")
    return {"images_per_second": rate["images_per_second"],
            "waits for the exchange": "not measured" if waits is None else f"{waits:.1%}",
            "runs as": f"{took['allreduce']} {took['by'] or ''}".strip()}


def stop(machine, folder: Path) -> Step:
    batch = machine.workers * max(4, 32 // machine.workers)  # small, so that the signal comes before the last update
    size = ["--model=convnet", "--epochs=2"] if machine.pretend else ["--model=resnet20", "--epochs=4"]
    words = python("-m", "launch.first_hour_probe", "stop", folder / "trainings" / "stop", machine.workers, *size,
                   f"--batch_size={batch}", "--checkpoint_every=0.2", "--deterministic")
    return Step("stop", "Stopping a training run with SIGUSR1, and resuming it", 300, [
        Command({"workers": machine.workers}, words, 300, stopped)])


def stopped(output: str) -> dict:
    """Returns columns from the probe's JSON. Raises UserError if the resumed run differs from the undisturbed one."""
    found = last_json(output)
    if found["differ"]:
        raise UserError(f"{len(found['differ'])} differ from the undisturbed run; the first is {found['differ'][0]}")
    return {"exit code on SIGUSR1": found["stopped"], "resumed": found["resumed"], "differences to the bit": 0}
