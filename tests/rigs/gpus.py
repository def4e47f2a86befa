"""GPUs where there are none: an nvidia-smi that lists them. What CUDA itself does with them cannot be pretended."""
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
    print(", ".join(str(gpu[field]) for field in fields))
"""
V100 = {"name": "Tesla V100-SXM2-32GB", "driver_version": "535.183.01", "memory.total": 32768, "compute_cap": 7.0}


def gpu(number: int, **changed) -> dict:
    """What nvidia-smi says of a GPU, by its field."""
    return V100 | {"index": number, "uuid": f"GPU-{number:08x}-1234", "pci.bus_id": f"00000000:{number + 6:02X}:00.0"
                   } | {name.replace("__", "."): value for name, value in changed.items()}


def pretend(folder: Path, gpus: list[dict], one_each: bool = False, unknown: tuple[str, ...] = ()) -> dict[str, str]:
    """The variables with which a program finds these GPUs. one_each: each worker of a node sees its own alone."""
    program = folder / "nvidia-smi"
    program.write_text(PROGRAM.format(gpus=gpus, one_each=one_each, unknown=unknown))
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
