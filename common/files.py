"""Atomic file writes, strict JSON, fsync, locks, and folders that last as long as the processes that hold them."""
import contextlib
import csv
import errno
import fcntl
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from common.errors import UserError, complain, full_disk

MEMORY = "/dev/shm"
MOUNTS = Path("/proc/self/mountinfo")
# What file systems answer to a call that they do not offer: CIFS, FUSE, exFAT, the shared folders of virtual machines.
# They may answer anything else, too.
LACKS_CALL = {errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS, errno.ENOTTY, errno.ENOLCK, errno.EBADF}
BROKEN = {errno.EIO, errno.ENOSPC, errno.EDQUOT}  # what they answer if the disk is broken or full
NAMED = set()  # calls for which `ignore_unsupported` has printed its line
ON_NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "9p", "afs", "orangefs",
              "panfs", "wekafs", "fuse"}

STAND_INS = {  # how a file begins that a clone or a download has left in place of another, and what it is
    rb"version https://git-lfs": "a Git LFS pointer; `git lfs pull` in its repository fetches the file",
    rb"/annex/objects/": "a git-annex pointer; `git annex get` in its repository fetches the file",
    rb"(?i)[\s\xef\xbb\xbf]*(<\?xml[^>]*>\s*)?<(!doctype html|html|head|error)\b":
        "a web page, such as a sign-in or an error; download the file again"}


def stand_in(start: bytes) -> str | None:
    """Returns what a file is that begins so, and what to do, if something has left it in place of another file."""
    return next((words for pattern, words in STAND_INS.items() if re.match(pattern, start)), None)


def start_of(path) -> bytes:
    """Returns the first bytes of a file, for `stand_in`. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(500)


def write_atomically(path, content: str | bytes, durable: bool = False) -> None:
    """Writes a file atomically: writes a temporary file, then renames it.

    durable: calls fsync before the rename, so that after a power failure the file is either the old or the new one.
    """
    scratch = Path(f"{path}.part")
    try:
        with full_disk_named(path):
            scratch.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            if durable:
                flush(scratch)
            scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def full_disk_named(path) -> Iterator[None]:
    """Context manager that replaces the error of a full disk or quota by an OSError with the name of a file or folder.

    Python's write() raises such an error without a name, and TensorFlow raises it as an error of its own.
    """
    try:
        yield
    except Exception as error:
        if (full := full_disk(error)) and not getattr(error, "filename", None):
            raise OSError(full, os.strerror(full), str(path)) from None
        raise


def append(path, text: str) -> None:
    """Appends text to a file, or leaves the file as it was and raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        rest = text.encode()
        try:
            while rest:
                rest = rest[os.write(descriptor, rest):]
        except OSError as error:
            os.ftruncate(descriptor, size)
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def write_json(path, content, durable: bool = False) -> None:
    write_atomically(path, as_json(content, indent=1) + "\n", durable)


def as_csv(rows: Iterable[Iterable]) -> str:
    """Returns rows of cells as CSV. None is an empty cell. The first row has the heads."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    return written.getvalue()


def as_json(content, indent=None, ensure_ascii: bool = True) -> str:
    """Returns content as strict JSON. Numbers in dicts and lists that are not finite, such as a loss, become null.

    ensure_ascii: whether letters outside of ASCII are escaped.
    """
    def finite(value):
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(content), indent=indent, allow_nan=False, ensure_ascii=ensure_ascii)


def is_on_network(path, mounts: Path = MOUNTS) -> bool:
    """Whether a file is on a network file system. FUSE counts as one, because most of these serve buckets or clusters.

    mounts: the system's list of mounts.
    """
    kinds = {}
    for line in mounts.read_bytes().splitlines():  # ... root, mount point, options, - type source options
        before, _, after = line.partition(b" - ")
        mount = before.split()[4].decode("unicode_escape").encode("latin-1")  # a space is \\040 there
        kinds[Path(os.fsdecode(mount))] = os.fsdecode(after.split()[0])
    path = Path(path).resolve()
    kind = next((kinds[folder] for folder in (path, *path.parents) if folder in kinds), "")
    return kind.partition(".")[0] in ON_NETWORK


def ignore_unsupported(call: str, path, error: OSError, effect: str, unsupported: Set[int] | None = None) -> None:
    """Ignores the error of an optional call, such as a symbolic link, if the file system does not offer the call.

    Prints one line for each such call in a process. Raises any other error.

    effect: what the user has to know, for the line. unsupported: error numbers that mean "not offered", for a call
    without which data may be lost. Default: all but BROKEN.
    """
    if error.errno in BROKEN or not (unsupported is None or error.errno in unsupported):
        raise error
    if call not in NAMED:
        complain(f"the file system of {path} has no {call} ({error.strerror}); {effect}", "warning")
    NAMED.add(call)


def flush(path) -> None:
    """Calls fsync on a file or a folder. Prints one line if the file system does not offer it.

    After an unknown error, the content of a file may be lost, so it is raised. The files in a folder are there all the
    same, so of a folder only those in BROKEN are.
    """
    unsupported = None if os.path.isdir(path) else LACKS_CALL
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        ignore_unsupported("fsync", path, error, "a power failure may lose what was written last", unsupported)


def replace(scratch: Path, path: Path) -> None:
    """Moves a finished file or folder to a path. If it replaces a folder, first the new one stands, then the old goes.

    Whatever fails, one of the two is at `path`. Raises OSError.
    """
    if not any(one.is_dir() and not one.is_symlink() for one in (scratch, path)) or not os.path.lexists(path):
        scratch.replace(path)
        return
    old = path.with_name(f"{path.name}.old")
    remove(old)  # which a killed process left
    path.rename(old)
    try:
        scratch.rename(path)
    except OSError:
        old.rename(path)
        raise
    with contextlib.suppress(OSError):
        remove(old)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if there is one. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(path: Path, target: str) -> None:
    """Makes a path a symbolic link to a folder next to it, or a file that holds its name if there are no links.

    `followed` reads both. Replaces an earlier link or file, and a folder, which a copying program may have made of a
    link. Raises OSError.
    """
    part = Path(f"{path}.part")
    part.unlink(missing_ok=True)
    try:
        part.symlink_to(target)
    except OSError as error:
        ignore_unsupported("symbolic links", path, error, f"{path.name} is a file that names the folder")
        part.write_text(target)
    replace(part, path)


def followed(path: Path) -> Path:
    """Returns the folder to which a file made by `link` leads. Any other path is returned as it is."""
    if not path.is_file():
        return path
    with open(path, errors="replace") as file:
        name = file.readline(60).strip()  # of what may be any file
    return path.parent / name if name and (path.parent / name).is_dir() else path


@contextlib.contextmanager
def locked(path, wait: bool = False, needed: bool = False) -> Iterator[int | None]:
    """Context manager that locks a folder or a file. The kernel frees the lock when the process ends in any way.

    It yields the descriptor of the locked file, which is created if it is missing. On NFS, the lock of a file holds for
    all hosts, and that of a folder only for this host.

    wait: whether to wait until the lock is free. Otherwise a taken lock raises BlockingIOError.
    needed: whether to raise UserError if the file system has no locks. Otherwise one line says so, and the context
        manager locks nothing and yields None.
    """
    descriptor = os.open(path, os.O_RDONLY if os.path.isdir(path) else os.O_RDWR | os.O_CREAT, 0o666)
    is_locked = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno == errno.EACCES:  # what CIFS says of a lock that is taken
                raise BlockingIOError(errno.EAGAIN, error.strerror) from None
            if needed and error.errno in LACKS_CALL:
                raise UserError(f"the file system of {path} has no locks; choose a folder on a local disk") from None
            ignore_unsupported("locks", path, error, "start no other program that writes there", LACKS_CALL)
            is_locked = False
        yield descriptor if is_locked else None
    finally:
        os.close(descriptor)


def is_abandoned(path) -> bool:
    """Whether a file exists whose lock no process holds any more. False if the file system cannot tell."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until the file is closed, at once
    except OSError:
        return False
    return True


def in_memory(size: int) -> str | None:
    """Returns a folder in memory with ample room for files of `size` bytes in all, or None if there is none.

    Many small files are created and deleted faster there than on a disk.
    """
    return MEMORY if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 10 * size else None


def cache_folder() -> Path:
    """Returns the user's cache of this program, which it creates. Raises OSError, and RuntimeError without a home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bigbatch"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def private_folder(place) -> Path:
    """Returns the folder of this user in a place where other users can write, and creates it if it does not exist.

    Nobody else can read or write in it, so what it holds is the user's own. Raises UserError if that name is taken by
    anything else, and OSError if the folder cannot be created.
    """
    folder = Path(place).absolute() / f"bigbatch-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    if not _is_own_folder(folder) or folder.stat().st_mode & 0o077:
        raise UserError(f"{folder} is not a folder that only you can open; remove it, or choose another folder than "
                        f"{place}")
    return folder


def scratch_path(place=None) -> Path:
    """Returns a path for `scratch_folder` that no other process chooses or can guess.

    place: the folder that contains it. Default: that of temporary files.
    """
    return Path(place or tempfile.gettempdir()) / f"bigbatch-scratch-{secrets.token_hex(8)}"


@contextlib.contextmanager
def scratch_folder(place=None, path: Path | None = None) -> Iterator[Path]:
    """Context manager for a new folder that only this user can open. Also removes those that killed processes left.

    place: as in scratch_path. path: a result of scratch_path, in place of a new one. Where there are no locks, the
    folders of killed processes stay.
    """
    folder = path or scratch_path(place)
    for left in folder.parent.glob("bigbatch-scratch-*"):
        remove_unheld(left)
    folder.mkdir(mode=0o700)
    with contextlib.ExitStack() as held:
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            held.callback(os.close, hold(folder))
        yield folder


def hold(folder: Path) -> int:
    """Creates a folder if it does not exist, and holds it until the descriptor that it returns is closed.

    Several processes can hold it. However a process ends, it no longer holds the folder. Raises OSError if the file
    system has no locks.
    """
    while True:
        with contextlib.suppress(FileExistsError):  # exist_ok would fail if it is removed meanwhile
            folder.mkdir(mode=0o700)
        # Another process may remove it before it is locked.
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as unless_held:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            unless_held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_at(descriptor, folder):
                unless_held.pop_all()
                return descriptor


def is_held(folder: Path) -> bool:
    """Whether a process holds a folder. True if the file system cannot tell. Raises OSError if there is none."""
    try:
        with locked(f"{folder}/") as descriptor:  # with a slash, no file is created if there is no folder
            return descriptor is None
    except BlockingIOError:
        return True


def remove_unheld(folder: Path, seconds: float = 0) -> None:
    """Removes a folder of this user, unless a process holds it. seconds: to wait for the end of those that do."""
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError):  # another process may have removed it
        while time.monotonic() < end and is_held(folder):
            time.sleep(0.1)
        if _is_own_folder(folder):
            with locked(f"{folder}/") as descriptor:
                if descriptor is not None and _is_at(descriptor, folder):
                    shutil.rmtree(folder)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still leads to an open folder, and not to one that replaces it. Raises FileNotFoundError."""
    return os.path.samestat(os.fstat(descriptor), os.stat(path))


def _is_own_folder(path: Path) -> bool:
    state = os.lstat(path)
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
