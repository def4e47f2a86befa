"""GPUs where there are none: an nvidia-smi that lists them, and a PCI bus. What CUDA does with them stays untested."""
import os
from pathlib import Path

PROGRAM = """#!/usr/bin/env python3
import os, sys
gpus, one_each, unknown = {gpus!r}, {one_each!r}, {unknown!r}
fields = sys.argv[1].partition("=")[2].split(",")
if set(fields) & set(unknown):
    sys.exit(2)  # as nvidia-smi does: Field "compute_cap" is not a valid field to query.
if one_each:  # what a task sees whose cgroup holds one GPU
    gpus = [dict(gpus[int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])], index=0)]
for gpu in gpus:
    print(gpu if isinstance(gpu, str) else ", ".join(str(gpu[field]) for field in fields))
sys.exit({code})
"""
V100 = {"name": "Tesla V100-SXM2-32GB", "driver_version": "535.183.01", "memory.total": 32768, "compute_cap": 7.0}


def gpu(number: int, **changed) -> dict:
    """What nvidia-smi says of a GPU, by its field."""
    return V100 | {"index": number, "uuid": f"GPU-{number:08x}-1234", "pci.bus_id": f"00000000:{number + 6:02X}:00.0"
                   } | {name.replace("__", "."): value for name, value in changed.items()}


def pretend(folder: Path, gpus: list[dict | str], one_each: bool = False, unknown: tuple[str, ...] = (), code: int = 0,
            on_bus: int | None = None) -> dict[str, str]:
    """The variables with which a program finds these GPUs. A text stands for a line that nvidia-smi says in place of a
    GPU. one_each: each worker of a node sees its own alone. code: nvidia-smi's exit code. on_bus: GPUs on the PCI bus;
    None: the machine's own.
    """
    program = folder / "nvidia-smi"
    program.write_text(PROGRAM.format(gpus=gpus, one_each=one_each, unknown=unknown, code=code))
    program.chmod(0o755)
    found = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return found if on_bus is None else found | {"BIGBATCH_PCI": str(bus(folder, range(on_bus)))}


def bus(folder: Path, numbers) -> Path:
    """A folder of PCI devices: GPUs at the addresses that `gpu` gives them, and what no GPU is."""
    devices = {f"0000:{number + 6:02x}:00.0": ("0x10de", "0x030200") for number in numbers}
    devices |= {"0000:00:02.0": ("0x1234", "0x030000"), "0000:05:00.0": ("0x10de", "0x068000")}  # an NVSwitch
    for address, named in devices.items():
        (folder / "pci" / address).mkdir(parents=True, exist_ok=True)
        for name, content in zip(("vendor", "class"), named, strict=True):
            (folder / "pci" / address / name).write_text(f"{content}\n")
    return folder / "pci"
