"""A Python whose workers write down what a site has set for the network, and end."""
import sys
from pathlib import Path

SET = {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "UCX_NET_DEVICES": "mlx5_0:1"}
PROGRAM = """#!/bin/sh
case "$*" in *" launch.binding "*) ;; *) exec {python} "$@" ;; esac
echo "$NCCL_IB_HCA $UCX_NET_DEVICES" >"{folder}/$(hostname)-$$"
exit 1
"""


def telling_python(folder: Path) -> Path:
    """Returns the program. folder: where each worker writes."""
    folder.mkdir()
    program = folder.with_suffix(".sh")
    program.write_text(PROGRAM.format(python=sys.executable, folder=folder))
    program.chmod(0o755)
    return program


def told(folder: Path) -> list[dict[str, str]]:
    """Returns what each worker has found."""
    return [dict(zip(SET, path.read_text().split(), strict=False)) for path in folder.iterdir()]
