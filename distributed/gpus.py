"""The NVIDIA GPUs of this machine that nvidia-smi lists and CUDA_VISIBLE_DEVICES lets this process use.

Where the PCI bus has NVIDIA GPUs, a driver that fails is an error in the words of nvidia-smi. The numbers of GPUs are
not compared: a container or a Slurm job sees the whole bus, but may have only some of them.

This module needs neither TensorFlow nor CUDA, so a launcher can use it before it starts a worker.
"""
import functools
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError, complain

FIELDS = ("index", "uuid", "pci.bus_id", "name", "driver_version", "memory.total", "compute_cap")
VISIBLE = "CUDA_VISIBLE_DEVICES"
PCI = Path(os.environ.get("BIGBATCH_PCI", "/sys/bus/pci/devices"))  # tests set the variable
NVIDIA = "0x10de"  # the vendor of a PCI device
DISPLAY = "0x03"  # the start of its class
ADDRESS = re.compile(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")  # PCI bus ID with a domain of four digits
FAULT = re.compile(r"\[(?:GPU is lost|GPU requires reset|Unknown Error|ERR!)\]")  # nvidia-smi's, in place of a value
PATIENCE = 30  # seconds for nvidia-smi's answer: without its persistence mode, the driver initializes each GPU
MISSING = -1  # in place of an exit code: there is no nvidia-smi
UNKNOWN_FIELD, DAMAGED_INFOROM = 2, 14  # exit codes of nvidia-smi; a GPU whose infoROM is damaged computes
CPU_ANYWAY = "give --device=cpu to train on the CPU"
MEND = f"mend the driver or restart the host, leave out the GPUs that fail with {VISIBLE}, or {CPU_ANYWAY}"
# --no-cache: otherwise every other checkout of the machine would get this Horovod, which needs NCCL, from uv's cache.
NCCL_BUILD = "HOROVOD_GPU_OPERATIONS=NCCL uv sync --extra gpu --no-cache --reinstall-package horovod"


@dataclass(frozen=True)
class Gpu:
    """A GPU, as nvidia-smi describes it."""

    number: int  # nvidia-smi's index
    uuid: str
    address: str  # PCI bus ID, the name of its folder in PCI
    name: str
    driver: str  # version
    memory: float  # GiB
    capability: float  # CUDA compute capability


def visible(device: str = "auto") -> list[Gpu]:
    """Returns the GPUs that CUDA gives this process, in CUDA's order if CUDA_DEVICE_ORDER is PCI_BUS_ID.

    CUDA_VISIBLE_DEVICES lists numbers, UUIDs or prefixes of UUIDs. CUDA ignores everything from the first invalid one.
    device: the value of --device. There are no GPUs for "cpu".
    """
    gpus = [] if device == "cpu" else installed()
    picked = []
    if VISIBLE not in os.environ:
        return gpus
    for word in map(str.strip, os.environ[VISIBLE].split(",")):
        named = [gpu for gpu in gpus
                 if word == str(gpu.number) or (word.startswith("GPU-") and gpu.uuid.startswith(word))]
        if len(named) != 1 or named[0] in picked:
            break
        picked += named
    return picked


def own(local_rank: int) -> Gpu | None:
    """Returns the GPU that distributed.world assigns to a worker."""
    gpus = visible()
    return gpus[local_rank % len(gpus)] if gpus else None


def installed() -> list[Gpu]:
    """Returns every GPU that nvidia-smi describes; none if there is no driver."""
    return _asked()[0]


def on_pci() -> list[Path]:
    """Returns the folders of the NVIDIA GPUs on this machine's PCI bus, whether or not this process may use them."""
    return [path for path in sorted(PCI.glob("*"))
            if _attribute(path, "vendor") == NVIDIA and _attribute(path, "class").startswith(DISPLAY)]


def _attribute(device: Path, name: str) -> str:
    try:
        return (device / name).read_text().strip()
    except OSError:  # a device that is taken away, or a sandbox
        return ""


def failure(device: str = "auto") -> str | None:
    """Returns what nvidia-smi says if it fails or reports a broken GPU, or None.

    None, too, on a machine without NVIDIA GPUs, for --device=cpu, and if CUDA_VISIBLE_DEVICES leaves the broken GPUs
    out or hides all. device: the value of --device.
    """
    found, others, code = _asked()
    if device == "cpu" or code == MISSING or _hides_all() or not (found or on_pci()):
        return None
    is_sound = code in (0, DAMAGED_INFOROM) and not others
    leaves_out = VISIBLE in os.environ and len(visible()) == len(os.environ[VISIBLE].split(","))
    if found and (is_sound or leaves_out):
        return None
    return f"nvidia-smi fails: {'; '.join(_named(others, found)) or f'exit code {code} without a message'}"


def without_driver() -> str | None:
    """Returns a line if this machine has GPUs, but no nvidia-smi, unless CUDA_VISIBLE_DEVICES hides them; or None."""
    count = len(on_pci())
    if not count or _hides_all() or _asked()[2] != MISSING:
        return None
    return (f"no GPU is used: PCI shows {count} of NVIDIA, but there is no nvidia-smi; install NVIDIA's driver, or "
            "start the container with its GPUs (docker run --gpus=all)")


def _hides_all() -> bool:
    """Whether CUDA_VISIBLE_DEVICES is set and starts with a word that names no GPU."""
    return not re.match(r"\s*(\d|GPU-|MIG-)", os.environ.get(VISIBLE, "0"))


def _asked() -> tuple[list[Gpu], list[str], int]:
    """Returns (the GPUs that nvidia-smi describes, its other lines, its exit code or MISSING)."""
    code, lines = _nvidia_smi(FIELDS)
    if code == UNKNOWN_FIELD:  # drivers before 510 do not know compute_cap
        code, lines = _nvidia_smi(FIELDS[:-1])
    gpus = [*map(_described, lines)]
    return ([gpu for gpu in gpus if gpu],
            [line for line, gpu in zip(lines, gpus, strict=True) if not gpu and not line.startswith("WARNING")], code)


@functools.cache
def _nvidia_smi(fields: Sequence[str]) -> tuple[int, list[str]]:
    """Returns nvidia-smi's exit code, or MISSING, and its lines. What it warns of on standard error is left out."""
    try:
        process = subprocess.Popen(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
                                   text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError:
        return MISSING, []
    try:
        output, error = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()  # without waiting for its end, because it may hang in the driver
        return 1, [f"no answer within {PATIENCE} s"]
    said = output if process.returncode == 0 else f"{output}\n{error}"
    return process.returncode, [line for line in said.splitlines() if line.strip()]


def _described(line: str) -> Gpu | None:
    """Returns the GPU that a line of nvidia-smi describes, or None if it says something else, or that the GPU fails."""
    number, *words = line.split(", ")
    if not number.isdecimal() or len(words) not in (len(FIELDS) - 2, len(FIELDS) - 1) or FAULT.search(line):
        return None
    uuid, address, name, driver, memory, *capability = words
    return Gpu(int(number), uuid, address.lower()[-12:], name, driver, _number(memory) / 1024,
               _number(*capability or "0"))


def _named(lines: list[str], found: list[Gpu]) -> list[str]:
    """Returns nvidia-smi's lines on what fails, each with the index and the PCI bus ID of its GPU, if they are known.

    A line without a bus ID is on a GPU of the bus that `found` lacks, if there are as many of them as lines.
    """
    bus = [path.name for path in on_pci()]
    missing = [address for address in bus if address not in {gpu.address for gpu in found}]
    named = []
    for position, line in enumerate(lines):
        faults, addresses = dict.fromkeys(FAULT.findall(line)), [word.lower() for word in ADDRESS.findall(line)]
        if faults and not addresses and len(missing) == len(lines):
            addresses = [missing[position]]
        number = line.partition(",")[0]
        if not number.isdecimal() and addresses and addresses[0] in bus:
            number = str(bus.index(addresses[0]))
        gpu = ["GPU", *[number] * number.isdecimal(), *(f"({address})" for address in addresses[:1])]
        named.append(f"{' '.join(gpu)}: {', '.join(faults) or line}" if gpu[1:] else line)
    return named


def _number(text: str) -> float:
    """Parses a number; returns 0 for values that nvidia-smi does not know, such as [N/A]."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def check(world, device: str, nccl: bool) -> None:
    """Raises UserError on all ranks if GPUs fail or would silently stay idle, or if NCCL would fail.

    world: a distributed.world.World. device: "auto"; "gpu", which requires GPUs; "any", which accepts the CPU even if
    there are GPUs that TensorFlow cannot use; "cpu", which checks nothing. nccl: whether Horovod is built with NCCL.
    """
    if device == "cpu":
        return
    mine = own(world.local_rank)
    own_host = os.uname().nodename
    everyone = world.gather((own_host, mine and mine.uuid, len(visible()), world.gpu is not None, failure()), "GPUs")
    several_hosts = len({host for host, *_ in everyone}) > 1
    known = [(host, uuid) for host, uuid, _, usable, _ in everyone if uuid and usable]
    shared = len(set(known)) < len(known)
    for host, _, listed, usable, failed in everyone:
        problem = f"{failed}; {MEND}" if failed else _problem(listed, usable, device, len(everyone), nccl, shared)
        if problem:
            raise UserError(f"{host}: {problem}" if several_hosts else problem, on_all_ranks=True)
    if world.local_rank == 0 and world.gpu is None and (line := without_driver()):
        complain(f"{own_host}: {line}" if several_hosts else line)


def _problem(listed, usable, device, workers, nccl, shared):
    if not usable and device != "any" and (listed or device == "gpu"):
        if not listed:
            return f"--device=gpu: TensorFlow sees no GPU, and neither does nvidia-smi; {CPU_ANYWAY}"
        return (f"nvidia-smi lists {listed} GPU{'s' * (listed > 1)}, but TensorFlow can use none; install the CUDA "
                f"libraries with 'uv sync --extra gpu', check that the driver is 535 or newer, or {CPU_ANYWAY}")
    if usable and shared and nccl:
        return ("NCCL needs a separate GPU for each worker, but some workers share one; start one worker per GPU, or "
                "use Horovod without NCCL ('uv sync --extra gpu --reinstall-package horovod')")
    if usable and workers > 1 and not nccl and not shared:
        return (f"Horovod is built without NCCL, so {workers} workers would exchange gradients through their CPUs; "
                f"run '{NCCL_BUILD}', or {CPU_ANYWAY}")
    return None
