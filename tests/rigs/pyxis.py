"""Pyxis and Enroot where there are none: programs `srun` and `enroot` that keep account of containers on each node.

A container has no files of its own, and what runs in it runs on the node. What Pyxis does with a name is its README's
and pyxis_slurmstepd.c's: a container that exists is used again, and one that does not needs an image.
"""
import shutil
from pathlib import Path

SRUN = """#!/bin/bash
echo "$*" >>{top}/sruns
words=() in_container=''
while [ $# -gt 0 ]; do
    case "$1" in
        --container-image=*) export PYXIS_IMAGE=${{1#*=}} in_container=yes ;;
        --container-name=*) export PYXIS_NAME=${{1#*=}} in_container=yes ;;
        --container-*) ;;
        -n) words+=("$1" "$2") && shift ;;
        -*) words+=("$1") ;;
        *) break ;;
    esac
    shift
done
exec {srun} "${{words[@]}}" ${{in_container:+{top}/bin/task}} "$@"
"""
TASK = """#!/bin/bash
folder={top}/$SLURMD_NODENAME container={top}/$SLURMD_NODENAME/pyxis_$PYXIS_NAME
mkdir -p "$folder"
exec 9>"$folder.lock" && flock 9
if [ -z "$PYXIS_NAME" ] || [ ! -e "$container" ]; then
    [ -n "$PYXIS_IMAGE" ] || {{ echo "pyxis: a container with name $PYXIS_NAME does not exist" >&2; exit 1; }}
    [ "$PYXIS_IMAGE" != /images/broken.sqsh ] || {{ echo "pyxis: no such image" >&2; exit 1; }}
    echo "$SLURMD_NODENAME $PYXIS_NAME" >>{top}/unpacked
    [ -z "$PYXIS_NAME" ] || touch "$container"
fi
exec 9>&-
unset PYXIS_IMAGE PYXIS_NAME
exec "$@"
"""
ENROOT = """#!/bin/bash
cd {top}/$SLURMD_NODENAME || exit
[ "$1" != list ] || exec ls
[ "$1 $2 $3" = "remove --force --" ] && shift 3 && rm "$@"
"""


class Pyxis:
    """bin: the folder of the programs. top: an empty folder, where the account is kept."""

    def __init__(self, top: Path):
        self.top, self.bin = top, top / "bin"
        self.bin.mkdir(parents=True)
        for name, text in (("srun", SRUN), ("task", TASK), ("enroot", ENROOT)):
            (self.bin / name).write_text(text.format(top=top, srun=shutil.which("srun")))
            (self.bin / name).chmod(0o755)

    def left(self) -> list[Path]:
        """The containers that are there."""
        return [*self.top.glob("*/pyxis_*")]

    def unpacked(self) -> list[list[str]]:
        """(node, name) of each container that was made."""
        return [line.split() for line in (self.top / "unpacked").read_text().splitlines()]

    def sruns(self) -> list[str]:
        """The arguments of each srun."""
        return (self.top / "sruns").read_text().splitlines()
