"""The NVIDIA GPUs of this machine that nvidia-smi lists and CUDA_VISIBLE_DEVICES lets this process use.

This module needs neither TensorFlow nor CUDA, so a launcher can use it before it starts a worker.
"""
import functools
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import UserError

FIELDS = ("index", "uuid", "pci.bus_id", "name", "driver_version", "memory.total", "compute_cap")
VISIBLE = "CUDA_VISIBLE_DEVICES"
# --no-cache: otherwise every other checkout of the machine would get this Horovod, which needs NCCL, from uv's cache.
NCCL_BUILD = "HOROVOD_GPU_OPERATIONS=NCCL uv sync --extra gpu --no-cache --reinstall-package horovod"


@dataclass(frozen=True)
class Gpu:
    """A GPU, as nvidia-smi describes it."""

    number: int  # nvidia-smi's index
    uuid: str
    address: str  # PCI bus ID
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
    """Returns every GPU that nvidia-smi lists; none if there is no driver."""
    for fields in (FIELDS, FIELDS[:-1]):  # drivers before 510 do not know compute_cap
        rows = [line.split(", ") for line in _nvidia_smi(fields)]
        if rows and all(len(row) == len(fields) for row in rows):
            return [Gpu(int(number), uuid, address, name, driver, _number(memory) / 1024, _number(*capability or "0"))
                    for number, uuid, address, name, driver, memory, *capability in rows]
    return []


@functools.cache
def _nvidia_smi(fields: Sequence[str]) -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
                              text=True, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _number(text: str) -> float:
    """Parses a number; returns 0 for values that nvidia-smi does not know, such as [N/A]."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def check(world, device: str, nccl: bool) -> None:
    """Raises UserError on all ranks if GPUs would silently stay idle, or if NCCL would fail.

    world: a distributed.world.World. device: "auto"; "gpu", which requires GPUs; "any", which accepts the CPU even if
    there are GPUs that TensorFlow cannot use; "cpu", which checks nothing. nccl: whether Horovod is built with NCCL.
    """
    if device == "cpu":
        return
    mine = own(world.local_rank)
    listed = len(visible())
    everyone = world.gather((os.uname().nodename, mine and mine.uuid, listed, world.gpu is not None), "GPUs")
    several_hosts = len({host for host, *_ in everyone}) > 1
    known = [(host, uuid) for host, uuid, _, usable in everyone if uuid and usable]
    shared = len(set(known)) < len(known)
    for host, _, listed, usable in everyone:
        problem = _problem(listed, usable, device, len(everyone), nccl, shared)
        if problem:
            raise UserError(f"{host}: {problem}" if several_hosts else problem, on_all_ranks=True)


def _problem(listed, usable, device, workers, nccl, shared):
    if not usable and device != "any" and (listed or device == "gpu"):
        cure = "give --device=cpu to train on the CPU"
        if not listed:
            return f"--device=gpu: TensorFlow sees no GPU, and neither does nvidia-smi; {cure}"
        return (f"nvidia-smi lists {listed} GPU{'s' * (listed > 1)}, but TensorFlow can use none; install the CUDA "
                f"libraries with 'uv sync --extra gpu', check that the driver is 535 or newer, or {cure}")
    if usable and shared and nccl:
        return ("NCCL needs a separate GPU for each worker, but some workers share one; start one worker per GPU, or "
                "use Horovod without NCCL ('uv sync --extra gpu --reinstall-package horovod')")
    if usable and workers > 1 and not nccl and not shared:
        return (f"Horovod is built without NCCL, so {workers} workers would exchange gradients through their CPUs; "
                f"run '{NCCL_BUILD}', or give --device=cpu to train on the CPU")
    return None
