"""The files in a folder: which are images, and what is left out, such as hidden files."""
import contextlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.errors import one_line, shown

LEFT_BEHIND = {  # in lower case: of macOS, of Windows, of the network disks of Synology and QNAP, and of ext4
    "__macosx", "icon\r", "thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information",
    "@eadir", "#recycle", "@recycle", "lost+found"}
UNREAD_SUFFIXES = {".gif", ".heic", ".heics", ".heif", ".heifs", ".hif", ".avif", ".avifs"}
RARE_SUFFIXES = {  # of formats that DALI reads in part
    ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf",
    ".jpx"}
IMAGE_SUFFIXES = UNREAD_SUFFIXES | RARE_SUFFIXES | {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng"}
STARTS = {suffix: re.compile(start, re.DOTALL) for suffix, start in {  # of files, for those with another suffix or none
    ".jpg": rb"\xff\xd8\xff", ".png": rb"\x89PNG\r\n\x1a\n", ".gif": rb"GIF8[79]a", ".webp": rb"RIFF.{4}WEBP",
    ".bmp": rb"BM.{4}\0{4}", ".tif": rb"II[*+]\0|MM\0[*+]", ".ppm": rb"P[1-6f]\s+[#\d]",
    ".jp2": rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", ".heic": rb".{4}ftyp(avi[fs]|hei[cmsx]|hev[cmsx]|mif1|msf1)",
}.items()}
THREADS = 32  # that read the starts of files, for network file systems
NAMED = 3  # names in a line
NO_IMAGE = "files that are no images"
DAMAGED = "images that DALI cannot decode"
HIDDEN = "hidden files, system files (such as Thumbs.db) and links that lead nowhere"


def images(path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Returns the images in a folder and below it, and the files that are left out. Raises OSError.

    The images are a dict from path to suffix (`kind`), in the order of `walk`. The files left out are a dict from the
    reason to their paths.
    """
    files, hidden = walk(path)
    kinds = {file: _suffix(file) for file in files}
    others = [file for file, suffix in kinds.items() if suffix not in IMAGE_SUFFIXES]
    with ThreadPoolExecutor(THREADS) as pool:
        kinds |= zip(others, pool.map(lambda file: kind(path, file), others), strict=True)
    return {file: suffix for file, suffix in kinds.items() if suffix}, {
        NO_IMAGE: [file for file in others if not kinds[file]], HIDDEN: hidden}


def kind(path, name: str) -> str:
    """Returns a suffix of IMAGE_SUFFIXES for a file in a folder, or "" if it is no image.

    The file's own suffix decides. If that is another one, the first bytes do.
    """
    if (suffix := _suffix(name)) in IMAGE_SUFFIXES:
        return suffix
    with contextlib.suppress(OSError), open(f"{path}/{name}", "rb") as file:
        start = file.read(32)
        return next((suffix for suffix, known in STARTS.items() if known.match(start)), "")
    return ""


def _suffix(name) -> str:
    return os.path.splitext(name)[1].lower()


def left_out_line(path, left_out: dict[str, list[str]]) -> list[str]:
    """Returns a line that counts and names what was left out of a folder, or nothing if that is nothing."""
    parts = [f"{what} ({len(names):,}): {', '.join(one_line(shown(name)) for name in names[:NAMED])}"
             + ", ..." * (len(names) > NAMED) for what, names in left_out.items() if names]
    return [f"left out of {path}: {'; '.join(parts)}"] if parts else []


def walk(path, chain: frozenset | None = None) -> tuple[list[str], list[str]]:
    """Returns the files in a folder and below it, and the files and folders that are left out. Raises OSError.

    The files are relative to the folder, as pathlib sorts them. Links are followed. Left out is what is hidden, what is
    LEFT_BEHIND, and links that lead nowhere or back. chain: identities of the folder and of all that contain it.
    """
    chain = chain or _chain(path)
    here, left_out = entries(path, chain)
    files = []
    for name, folder in here:
        if folder:
            below, more = walk(f"{path}/{name}", chain | {folder})
            files += (f"{name}/{file}" for file in below)
            left_out += (f"{name}/{file}" for file in more)
        else:
            files.append(name)
    return files, left_out


def entries(path, chain: frozenset | None = None) -> tuple[list[tuple[str, tuple | None]], list[str]]:
    """Returns the sorted (name, identity of a folder or None) of what is in a folder, and the names left out.

    chain: as in `walk`.
    """
    chain = chain or _chain(path)
    with os.scandir(path) as scanned:  # knows what is a folder without a call for each
        found = sorted(scanned, key=lambda entry: entry.name)
    kept = {}
    for entry in found:
        if entry.name.startswith(".") or entry.name.lower() in LEFT_BEHIND:
            continue
        try:
            folder = _identity(entry) if entry.is_dir() else None
            if folder not in chain if folder else entry.is_file():
                kept[entry.name] = folder
        except OSError:
            if not entry.is_symlink():  # such as one that leads to itself
                raise
    return [*kept.items()], [entry.name for entry in found if entry.name not in kept]


def _identity(path) -> tuple[int, int]:
    """Returns device and inode, which are the same for all names of a folder."""
    state = os.stat(path)
    return state.st_dev, state.st_ino


def _chain(path) -> frozenset:
    """Returns the identities of a folder and of all folders that contain it. A link to one of these leads back."""
    return frozenset(map(_identity, (path, *Path(path).absolute().parents)))
