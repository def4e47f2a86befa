"""Packs the environment and the code, for nodes that run them from a local disk: `python -m launch.stage_env`.

It prints the paths of two archives. One holds the virtual environment and the Python that it is based on, and is made
again only if the installed packages change. The other holds the code of the checkout. launch/stage_env.sh unpacks both
on each node, once for all of its workers, which then start without reading the environment from a shared file system.
"""
import contextlib
import functools
import hashlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from common import command
from common.errors import UserError
from common.files import flush, write_json
from launch import hosts as host_lists
from launch.facts import ROOMS, ROOT
from reporting.about import REVISION, git_revision

ARCHIVES = Path("runs/environments")
SYSTEM = Path("/usr")  # a Python in it is on the local disks already
UNUSED = ("site-packages", "test", "tests", "idlelib", "ensurepip")  # of the base installation
SCRIPT, WRAPPER = ROOT / "launch" / "stage_env.sh", ROOT / "launch" / "staged_python.sh"
PATIENCE = 60  # seconds for a host to remove its copy


def pack_environment(prefix: Path, base: Path, folder: Path) -> Path:
    """Returns the archive of a virtual environment and of the Python installation that it is based on.

    prefix, base: sys.prefix and sys.base_prefix. folder: of the archive. An archive is used again as long as the same
    packages are installed; an edited file of a package is not noticed. Raises UserError.
    """
    prefix, base, python = prefix.resolve(), base.resolve(), (prefix / "bin" / "python").resolve()
    if not (prefix / "pyvenv.cfg").is_file():
        raise UserError(f"--stage-env: {prefix} is not a virtual environment; run 'uv sync', or leave out --stage-env")
    contents = {"venv": prefix}
    if not base.is_relative_to(SYSTEM):
        contents |= {f"base/{part}": base / part for part in {"lib", sys.platlibdir, str(python.relative_to(base))}}
    installed = [prefix / "pyvenv.cfg", python, Path(__file__),
                 *sorted(prefix.glob("lib/python*/site-packages/*.dist-info/RECORD"))]
    return _archive(folder / "environment", contents, _identity(installed), base)


def pack_code(root: Path, folder: Path) -> Path:
    """Returns the archive of the checkout's code and git revision."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / REVISION, git_revision(root))
    contents = {f"code/{path.name}": path for path in [*sorted(root.glob("*.py")), *(root / room for room in ROOMS)]}
    files = [file for path in contents.values() for file in sorted([path, *path.rglob("*")])
             if file.is_file() and file.suffix != ".pyc"]
    contents |= {f"code/{REVISION}": folder / REVISION, "python": WRAPPER}
    return _archive(folder / "code", contents, _identity([*files, WRAPPER], (folder / REVISION).read_text()), root)


def _identity(files: list[Path], *texts: str) -> str:
    """Returns twelve digits that change if the size or the time of a file changes."""
    stats = [(file, os.stat(file)) for file in files]
    lines = [*texts, *(f"{file} {found.st_size} {found.st_mtime_ns}" for file, found in stats)]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:12]


def _archive(name: Path, contents: Mapping[str, Path], identity: str, base: Path) -> Path:
    """Returns the archive NAME-IDENTITY-DIGEST.tar.*, which is made if it does not exist.

    contents: files and folders by their names in the archive.
    """
    if made := sorted(name.parent.glob(f"{name.name}-{identity}-*.tar.*")):
        return made[0].absolute()
    name.parent.mkdir(parents=True, exist_ok=True)
    print(f"--stage-env: packing the {name.name} in {name.parent}", file=sys.stderr, flush=True)
    unused = f"^{re.escape(str(base))}/.*/({'|'.join(UNUSED)})/|/bin/[^/]*$"
    # Otherwise each worker would compile what no process has imported yet. The result stays with the sources, too.
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j0", "-x", unused, *contents.values()],
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    program, suffix = (["zstd", "-q", "-T0"], "zst") if shutil.which("zstd") else (["gzip"], "gz")
    part = name.with_name(f"{name.name}-{secrets.token_hex(4)}.part")
    try:
        with open(part, "wb") as output, contextlib.suppress(BrokenPipeError), \
                subprocess.Popen(program, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL) as packer, \
                tarfile.open(mode="w|", fileobj=packer.stdin, format=tarfile.GNU_FORMAT) as tar:
            for inside, path in contents.items():
                tar.add(path, inside, filter=functools.partial(_member, base))
        if packer.returncode:
            raise UserError(f"--stage-env: {program[0]} cannot write to {name.parent}; make room there")
        flush(part)
        with open(part, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return part.rename(f"{name}-{identity}-{digest[:16]}.tar.{suffix}").absolute()
    finally:
        part.unlink(missing_ok=True)


def _member(base, info):
    """Leaves out what nobody uses. Links from the virtual environment to its base installation become relative."""
    if info.name.startswith("base/") and {*UNUSED} & {*info.name.split("/")}:
        return None
    if info.issym() and os.path.isabs(info.linkname) and (target := Path(info.linkname).resolve()).is_relative_to(base):
        info.linkname = os.path.relpath("base" / target.relative_to(base), os.path.dirname(info.name))
    return info


@contextlib.contextmanager
def staged(hosts: list[host_lists.Host], folder: str) -> Iterator[tuple[str, Path]]:
    """Context manager that unpacks the environment and the code on all hosts, and removes them at its end.

    folder: on a local disk of each host. Yields (the Python of the copies, the folder of their code).
    """
    if not os.path.isabs(folder):
        raise UserError(f"--stage-env takes the absolute path of a local disk, not '{folder}'")
    archives, began = archives_here(), time.monotonic()
    copy = Path(folder) / f"bigbatch-{os.getuid()}" / f"environment-{secrets.token_hex(4)}"
    unpack = ["bash", *map(str, (SCRIPT, copy, *archives))]
    # The scripts end when their standard input does, also if this process is killed.
    running = [subprocess.Popen(host_lists.words(host.name, unpack), text=True, stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
               for host in hosts]
    try:
        for host, process in zip(hosts, running, strict=True):
            if not any(line == "ready\n" for line in process.stdout):
                last_line = (process.stderr.read().strip() or f"{host.name}: staging failed").splitlines()[-1]
                raise UserError(last_line.removeprefix("stage_env.sh: "))
        print(f"horovodrun.sh: staged the environment to {copy} in {time.monotonic() - began:.0f} s", file=sys.stderr)
        yield str(copy / "python"), copy / "code"
    finally:
        for process in running:
            process.stdin.close()
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.kill()


def archives_here() -> list[Path]:
    """Returns the archives of this environment and of this checkout, in the current folder's runs/environments."""
    return [pack_environment(Path(sys.prefix), Path(sys.base_prefix), ARCHIVES), pack_code(ROOT, ARCHIVES)]


if __name__ == "__main__":
    with command.shell("stage_env") as ending:
        print(*archives_here(), sep="\n")
    sys.exit(ending.code)
