"""Packs the environment and the code, for nodes that run them from a local disk: `python -m launch.stage_env`.

It prints the paths of two archives. One holds the virtual environment and the Python that it is based on, and is made
again only if the installed packages change. The other holds the code of the checkout. launch/stage_env.sh unpacks both
on each node, once for all of its workers, which then start without reading the environment from a shared file system.
"""
import contextlib
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import command
from common.errors import UserError
from common.files import write_json
from launch import hosts as host_lists
from launch.facts import ROOMS, ROOT
from reporting.about import REVISION, git_revision

ARCHIVES = Path("runs/environments")
SYSTEM = Path("/usr")  # a Python in it, such as a distribution's, is on the local disks already
UNUSED = {"site-packages", "test", "tests", "idlelib", "ensurepip"}  # of the base installation
SCRIPT = ROOT / "launch" / "stage_env.sh"


def pack_environment(prefix: Path, base: Path, folder: Path) -> Path:
    """Returns the archive of a virtual environment and of the Python installation that it is based on.

    prefix, base: sys.prefix and sys.base_prefix. folder: of the archive. An archive is used again as long as the same
    packages are installed; an edited file of a package is not noticed. Raises UserError.
    """
    if not (prefix / "pyvenv.cfg").is_file():
        raise UserError(f"--stage-env: {prefix} is not a virtual environment; run 'uv sync', or leave out --stage-env")
    python = (prefix / "bin" / "python").resolve()
    base = base.resolve()
    contents = {"venv": prefix.resolve()}
    if not base.is_relative_to(SYSTEM):
        contents |= {f"base/{part}": base / part for part in {"lib", sys.platlibdir}} | {"base/bin/python": python}
    records = sorted(prefix.glob("lib/python*/site-packages/*.dist-info/RECORD"))
    return _archive(folder, "environment", contents, [prefix / "pyvenv.cfg", python, *records])


def pack_code(root: Path, folder: Path) -> Path:
    """Returns the archive of the checkout's code and git revision. Raises UserError."""
    write_json(folder / REVISION, git_revision(root))
    parts = [*sorted(root.glob("*.py")), *(root / room for room in ROOMS), folder / REVISION]
    contents = {f"code/{path.name}": path for path in parts} | {"python": SCRIPT.with_name("staged_python.sh")}
    files = [file for path in contents.values() for file in sorted([path, *path.rglob("*")])
             if file.is_file() and file.suffix != ".pyc"]
    return _archive(folder, "code", contents, files)


def _archive(folder: Path, name: str, contents: dict[str, Path], files: list[Path]) -> Path:
    """Returns an archive in a folder, which is made unless it was made before from `files` of the same content.

    contents: files and folders by their names in the archive.
    """
    content = b"\0".join(os.fsencode(file) + b"\0" + file.read_bytes() for file in [Path(__file__), *files])
    program, suffix = (["zstd", "-q", "-T0"], "zst") if shutil.which("zstd") else (["gzip"], "gz")
    path = (folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.tar.{suffix}").absolute()
    if path.is_file():
        return path
    print(f"--stage-env: packing the {name} in {folder}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="part-", dir=folder) as part:
        with open(f"{part}/{name}", "wb") as output, contextlib.suppress(BrokenPipeError), \
                subprocess.Popen(program, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL) as packer, \
                tarfile.open(mode="w|", fileobj=packer.stdin, format=tarfile.GNU_FORMAT) as tar:
            for inside, outside in contents.items():
                tar.add(outside, inside, filter=_used)
        if packer.returncode:
            raise UserError(f"--stage-env: {program[0]} cannot write to {folder}; make room there")
        return Path(part, name).rename(path)


def _used(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if info.name.startswith("base/") and UNUSED & {*info.name.split("/")} else info


@contextlib.contextmanager
def staged(hosts: list[host_lists.Host], folder: str) -> Iterator[tuple[str, Path]]:
    """Context manager that unpacks the environment and the code on all hosts, and removes them at its end.

    folder: on a local disk of each host. Yields (the Python of the copies, the folder of their code).
    """
    if not os.path.isabs(folder):
        raise UserError(f"--stage-env takes the absolute path of a local disk, not '{folder}'")
    copy = Path(folder) / f"bigbatch-{os.getuid()}" / f"environment-{secrets.token_hex(4)}"
    unpack = ["bash", *map(str, (SCRIPT, copy, *archives_here()))]
    with contextlib.ExitStack() as held:
        running = [held.enter_context(subprocess.Popen(
            host_lists.words(host.name, unpack), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True)) for host in hosts]
        # The scripts remove the copies when their standard input ends, also if this process is killed.
        held.callback(lambda: [process.stdin.close() for process in running])
        for host, process in zip(hosts, running, strict=True):
            if "ready\n" not in process.stdout:
                last_line = (process.stderr.read().strip() or f"{host.name}: staging failed").splitlines()[-1]
                raise UserError(last_line.removeprefix("stage_env.sh: "))
        print(f"horovodrun.sh: staged the environment to {copy}", file=sys.stderr)
        yield str(copy / "python"), copy / "code"


def archives_here() -> list[Path]:
    """Returns the archives of this environment and of this checkout, in the current folder's runs/environments."""
    ARCHIVES.mkdir(parents=True, exist_ok=True)
    return [pack_environment(Path(sys.prefix), Path(sys.base_prefix), ARCHIVES), pack_code(ROOT, ARCHIVES)]


if __name__ == "__main__":
    with command.shell("stage_env") as ending:
        print(*archives_here(), sep="\n")
    sys.exit(ending.code)
