"""Prints the facts of this host that training depends on, as JSON: `python -m launch.facts [train.py's flags]`.

It imports neither TensorFlow nor Horovod, so a login node collects the facts of all hosts within a few seconds.
"""
import hashlib
import json
import os
import platform
import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path

import psutil

from common import command
from data.named import is_table
from data.sources import BUILT_IN
from data.staging.remote import is_remote
from data.synthetic import is_synthetic
from distributed import gpus, rdma
from distributed.gpus import Gpu
from plan import flags

ROOT = Path(__file__).parents[1]
ROOMS = tuple(sorted({path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "tests"}))
PACKAGES = {"tensorflow": "tensorflow", "horovod": "horovod", "dali": "nvidia-dali-cuda120"}
GRANTED = "SLURM_GPUS_ON_NODE"
CONNECTION = "SSH_CONNECTION"  # set by sshd: client's address and port, server's address and port
SHARED_MEMORY = Path("/dev/shm")


def gather(data_dir: str, output_dir: str | None, device: str = "auto") -> dict:
    """Returns the facts of this host as a JSON object. With device="cpu", GPUs are left out."""
    output = Path(output_dir or "runs").absolute()
    return {"host": socket.gethostname(), "python": platform.python_version(), "source": source(),
            **{name: version(package) for name, package in PACKAGES.items()},
            **of_gpus(gpus.visible(device)), "gpu_failure": gpus.failure(device),
            "granted": int(os.environ.get(GRANTED, 0)),
            "dataset": dataset(data_dir), "output": writable(output), "disk": free(output),
            "shared_memory": free(SHARED_MEMORY), "infiniband": rdma.infiniband(), "pinnable": rdma.pinnable(),
            "interfaces": interfaces(), "ssh_address": ssh_address()}


def interfaces() -> dict[str, list[str]]:
    """Returns the IPv4 addresses of this host's network interfaces by name, without loopback and empty ones."""
    by_name = {name: [address.address for address in addresses if address.family == socket.AF_INET]
               for name, addresses in psutil.net_if_addrs().items()}
    return {name: addresses for name, addresses in by_name.items() if addresses and "127.0.0.1" not in addresses}


def ssh_address() -> str | None:
    """Returns this host's address at which ssh reached it to start this process, or None."""
    return (os.environ.get(CONNECTION, "").split() + [None] * 3)[2]


def of_gpus(visible: list[Gpu]) -> dict:
    """Returns the facts of a host's GPUs. capability: the largest, 0.0 if unknown. memory: the smallest, in GiB."""
    return {"gpus": [gpu.name for gpu in visible], "driver": visible[0].driver if visible else "",
            "capability": max((gpu.capability for gpu in visible), default=0.0),
            "memory": min((gpu.memory for gpu in visible), default=None)}


def version(package: str) -> str:
    """Returns the version of an installed package, or "missing"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def source() -> str:
    """Returns a digest of the checkout's Python files, eight hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted([ROOT / "train.py", *(path for room in ROOMS for path in (ROOT / room).glob("**/*.py"))]):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def dataset(data_dir: str) -> str:
    """Returns a string that identifies the dataset, or "missing", or "empty" for a folder without any file."""
    if data_dir in BUILT_IN or is_synthetic(data_dir) or is_remote(data_dir):
        return data_dir
    try:
        described = Path(data_dir) if is_table(data_dir) else Path(data_dir, "dataset.json")
        return hashlib.sha256(described.read_bytes()).hexdigest()[:8]
    except OSError:
        folders = [folder for folder in (Path(data_dir, "train"), Path(data_dir)) if folder.is_dir()]
        if folders and not any(folders[0].iterdir()):
            return "empty"
        return "a folder of images" if len(folders) == 2 else "missing"


def writable(folder: Path) -> bool:
    """Whether training can create this folder, or write to it."""
    return os.access(_existing(folder), os.W_OK | os.X_OK)


def free(folder: Path) -> float:
    """Returns the free space in GB (10^9 bytes) at the folder, or where it would be created; 0 if there is none."""
    return shutil.disk_usage(_existing(folder)).free / 1e9


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


@command.program("launch.facts", __doc__)
def main(argv) -> None:
    """Runs a command line."""
    settings = flags.parse(argv)
    print(json.dumps(gather(settings.recipe.data_dir, settings.run.output_dir, settings.launch.device)))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
