"""The NVIDIA GPUs of this machine: those that nvidia-smi lists and CUDA_VISIBLE_DEVICES lets this process use.

Needs neither TensorFlow nor CUDA, so that a launcher can ask before a worker is started.
"""
import functools
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import UserError

FIELDS = ("index", "uuid", "pci.bus_id", "name", "driver_version", "memory.total", "compute_cap")
VISIBLE = "CUDA_VISIBLE_DEVICES"
NCCL_BUILD = "HOROVOD_GPU_OPERATIONS=NCCL uv sync --extra gpu --reinstall-package horovod"


@dataclass(frozen=True)
class Gpu:
    """number: nvidia-smi's index. address: on the PCI bus. memory: in GiB. capability: CUDA's compute capability."""

    number: int
    uuid: str
    address: str
    name: str
    driver: str
    memory: float
    capability: float


def visible() -> list[Gpu]:
    """The GPUs that CUDA gives this process, in CUDA's order, where CUDA_DEVICE_ORDER is PCI_BUS_ID.

    CUDA_VISIBLE_DEVICES holds numbers or (the beginnings of) UUIDs. CUDA ignores what follows the first wrong one.
    """
    found, picked = installed(), []
    if VISIBLE not in os.environ:
        return found
    for word in map(str.strip, os.environ[VISIBLE].split(",")):
        named = [gpu for gpu in found
                 if word == str(gpu.number) or (word.startswith("GPU-") and gpu.uuid.startswith(word))]
        if len(named) != 1 or named[0] in picked:
            break
        picked += named
    return picked


def own(local_rank: int) -> Gpu | None:
    """The GPU that distributed.world gives a worker."""
    gpus = visible()
    return gpus[local_rank % len(gpus)] if gpus else None


def installed() -> list[Gpu]:
    """Every GPU that nvidia-smi lists; none where there is no driver."""
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
    """0 for what nvidia-smi does not know, such as [N/A]."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def check(world, device: str, nccl: bool) -> None:
    """Raises UserError on all ranks where the GPUs would silently stay idle, or where NCCL would fail.

    world: distributed.world's. device: "auto"; "gpu", which insists on GPUs; "any", which also takes the CPU where
    there are GPUs that TensorFlow cannot use; "cpu", where nothing is checked. nccl: whether Horovod is built with it.
    """
    if device == "cpu":
        return
    mine, listed = own(world.local_rank), len(visible())
    everyone = world.gather((os.uname().nodename, mine and mine.uuid, listed, world.gpu is not None), "GPUs")
    several_hosts = len({host for host, *_ in everyone}) > 1
    known = [(host, uuid) for host, uuid, _, usable in everyone if uuid and usable]
    for host, _, listed, usable in everyone:
        problem = _problem(listed, usable, device, len(everyone), nccl, shared=len(set(known)) < len(known))
        if problem:
            raise UserError(f"{host}: {problem}" if several_hosts else problem, on_all_ranks=True)


def _problem(listed, usable, device, workers, nccl, shared):
    if not usable and device != "any" and (listed or device == "gpu"):
        cure = "give --device=cpu to train on the CPU"
        if not listed:
            return f"--device=gpu: TensorFlow sees no GPU, and neither does nvidia-smi; {cure}"
        return (f"nvidia-smi lists {listed} GPU{'s' * (listed > 1)}, but TensorFlow can use none: run 'uv sync --extra "
                f"gpu' for the CUDA libraries, see that the driver is 535 or newer, or {cure}")
    if usable and shared and nccl:
        return ("NCCL takes one worker per GPU, and here several share one: start a worker per GPU, or use a Horovod "
                "without NCCL ('uv sync --extra gpu --reinstall-package horovod')")
    if usable and workers > 1 and not nccl and not shared:
        return (f"Horovod is built without NCCL: {workers} workers would exchange gradients through their CPUs; "
                f"run '{NCCL_BUILD}', or give --device=cpu to train on the CPU")
    return None
