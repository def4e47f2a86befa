"""One folder of images per class, read in place: train/CLASS/*.jpg, val/CLASS/*.jpg. Each split is one shard."""
import contextlib
import copy
import hashlib
import itertools
import os
import pickle
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from common.errors import one_line
from data.class_names import normal

SUFFIX = ""
ANY_ORDER = True
NO_IMAGES = "{} contains no images in class folders"
UNREAD = "GIF, HEIC and AVIF"  # of the formats that data.prepare reads, those that DALI does not
OPENED = 50_000  # files of a folder, at most, whose first bytes are read at the start
FRACTION = 0.2  # of each class that training sets aside for validation, unless the flag gives another
TRAIN, VALIDATION = ("train", "training"), ("val", "valid", "validation", "test", "testing")  # best first, any case
KNOWN = {"train", "val", "validation"}  # these names mean a split whatever is in it
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
TABLES = (".csv", ".tsv")  # suffixes of tables of files and labels
TABLE = "if a table names the classes, prepare the images with `data.prepare --source={} --output=FOLDER`"
NO_IMAGE = "files that are no images"
HIDDEN = "hidden files, system files (such as Thumbs.db) and links that lead nowhere"


def index_path(path) -> None:
    return None


def class_names(path) -> list[str]:
    """Returns the classes of a split: the sorted names of its folders, without those that `walk` leaves out."""
    return [name for name, folder in _entries(path, _chain(path))[0] if folder]


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
    entries, left_out = _entries(path, chain)
    files = []
    for name, folder in entries:
        if folder:
            below, more = walk(f"{path}/{name}", chain | {folder})
            files += (f"{name}/{file}" for file in below)
            left_out += (f"{name}/{file}" for file in more)
        else:
            files.append(name)
    return files, left_out


def _entries(path, chain) -> tuple[list[tuple[str, tuple | None]], list[str]]:
    """Returns the sorted (name, identity of a folder or None) of what is in a folder, and the names left out."""
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


def layout(folder: Path) -> tuple[Path, Path | None, list[Path]]:
    """Finds the splits by the names of folders: in a folder, or in the one folder in it that holds both.

    Returns where the class folders of training and of validation are (None if there are none), and folders with a name
    for a split that are not used. Raises OSError.
    """
    if found := _splits(folder):
        return found
    inside = [found for name in class_names(folder) if not _holds_images(folder / name)
              and (found := _splits(folder / name)) and found[1]]
    return inside[0] if len(inside) == 1 else (folder, None, [])


def _splits(folder) -> tuple[Path, Path | None, list[Path]] | None:
    """Returns what `layout` does for a folder, or None if the folders in it are classes.

    A class may be called train or test, too. So a name counts if it is in KNOWN, or has class folders.
    """
    names = class_names(folder)
    like = [[folder / name for word in words for name in reversed(names) if name.lower() == word]  # train before Train
            for words in (TRAIN, VALIDATION)]
    train, validation = (next((path for path in paths if path.name in KNOWN or has_classes(path)), None)
                         for paths in like)
    has_others = len(names) > sum(map(len, like))
    if not train or not (validation or not has_others or (train.name in KNOWN and has_classes(train))):
        return None
    return train, validation, [path for paths in like for path in paths if path not in (train, validation)]


def has_classes(path) -> bool:
    """Whether a folder contains folders of images."""
    return any(images(path / name)[0] for name in class_names(path))


def learnable(path) -> Iterator[str]:
    """Yields the classes of a split, without those whose files are no images, such as labels."""
    for name in class_names(path):
        found, left_out = images(f"{path}/{name}")
        if found or not left_out[NO_IMAGE]:
            yield name


def _holds_images(path) -> bool:
    return any(not folder and kind(path, name) for name, folder in _entries(path, _chain(path))[0])


def whole(folder: Path) -> Path | None:
    """Returns the folder that contains this one as one of its two splits, or None if there is none."""
    with contextlib.suppress(OSError):
        if (found := _splits(folder.parent)) and found[1] and folder in found:
            return folder.parent
    return None


def count(path, most: int) -> int:
    """Returns the number of images in class folders. It stops after the class with which it reaches `most`."""
    files = 0
    for name in class_names(path):
        files += len(images(f"{path}/{name}")[0])
        if files >= most:
            break
    return files


def set_aside(files: Sequence[str], labels: np.ndarray, fraction: float) -> np.ndarray:
    """Returns which images are for validation, bool (images,): about this fraction of each class, or all of them for 1.

    A hash of its path decides for each image alone, so that a new image moves no other one. Otherwise all images of a
    class might be on one side: so the one with the smallest hash is always for validation, and the one with the largest
    for training, as is a single one.

    files: paths, relative to the folder with the classes. labels: int64 (images,).
    """
    if fraction == 1:
        return np.ones(len(files), bool)
    digests = b"".join(hashlib.sha256(os.fsencode(file)).digest()[:8] for file in files)
    hashes = np.frombuffer(digests, ">u8")
    chosen = hashes < fraction * 2.0**64
    by_class = np.lexsort([hashes, labels])
    chosen[by_class[np.diff(labels[by_class], prepend=-1) != 0]] = True
    chosen[by_class[np.diff(labels[by_class], append=-1) != 0]] = False
    return chosen


def shown(name: str) -> str:
    """Returns the name of a file with its bytes that are not UTF-8 escaped."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def lone_validation(folder: Path) -> Path | None:
    """Returns the folder of validation images in a folder that has nothing else, such as test/, or None."""
    names = class_names(folder)
    found = [folder / name for word in VALIDATION for name in names if name.lower() == word]
    return next((path for path in found if len(found) == len(names) and has_classes(path)), None)


def conversion(folder: Path, *flags: str, then: str = "`uv run train.py --data_dir={}`") -> str:
    """Returns the commands that prepare a folder of images with these flags of data.prepare, and use the result."""
    output = shlex.quote(f"{folder}-prepared")
    prepare = ["uv run python -m data.prepare", f"--source={shlex.quote(str(folder))}", f"--output={output}", *flags]
    return f"run `{' '.join(prepare)}`, then {then.format(output)}"


def no_classes(folder: Path) -> str:
    """Returns what a folder may be meant as that has no folders of classes, as the end of a message, or ""."""
    with contextlib.suppress(OSError):
        tables = [path for place in (folder, folder.parent) for path in sorted(place.iterdir())
                  if path.name.lower().removesuffix(".gz").endswith(TABLES)]
        labels = f"; {TABLE.format(shlex.quote(str(tables[0])))}" if tables else ""
        if _holds_images(folder):
            return (f"; it has images that are in no folder of a class, which a trained model classifies: "
                    f"--mode=predict --image={shlex.quote(str(folder))}{labels}")
        return labels
    return ""


class Listing:
    """The images of a split and their labels.

    files: paths of the images, relative to the folder of the split.
    labels: int64 (images,).
    kinds: suffix (`kind`) of each image that is neither JPEG nor PNG, by its path.
    left_out: see `images`.
    """

    def __init__(self, path, classes: Sequence[str] | None = None):
        """Raises OSError. classes: names in label order, in normal form. Default: the sorted names of the folders.

        An image in the folder of another class gets the label -1.
        """
        folders = class_names(path)
        known = {name: label for label, name in enumerate(classes or map(normal, folders))}
        labels = {folder: known.get(normal(folder), -1) for folder in folders}
        kinds, self.left_out = images(path)
        self.left_out["images in no class folder"] = [file for file in kinds if "/" not in file]
        self.files = [file for file in kinds if "/" in file]
        self.kinds = {file: kinds[file] for file in self.files if kinds[file] in UNREAD_SUFFIXES | RARE_SUFFIXES}
        self.labels = np.array([labels[file.partition("/")[0]] for file in self.files], np.int64)

    def __len__(self):
        return len(self.files)

    def divided(self, fraction: float) -> tuple["Listing", "Listing"]:
        """Returns the images for training and those for validation (`set_aside`). The first lists what is left out."""
        chosen = set_aside(self.files, self.labels, fraction)
        train, validation = (self._chosen(numbers) for numbers in (np.flatnonzero(~chosen), np.flatnonzero(chosen)))
        validation.left_out = {}
        return train, validation

    def _chosen(self, numbers) -> "Listing":
        part = copy.copy(self)
        part.files = [self.files[number] for number in numbers]
        part.kinds = {file: self.kinds[file] for file in part.files if file in self.kinds}
        part.labels = self.labels[numbers]
        return part

    def sizes(self, path) -> list[tuple[str, int]]:
        """Returns pairs of an image and its size in bytes. Raises OSError. path: of the split."""
        with ThreadPoolExecutor(THREADS) as pool:
            return [*zip(self.files, pool.map(lambda file: os.stat(f"{path}/{file}").st_size, self.files), strict=True)]

    def __getstate__(self):
        """Compresses what rank 0 sends to the other workers: 54 MB for ImageNet."""
        return zlib.compress(pickle.dumps(vars(self)), 1)

    def __setstate__(self, state):
        vars(self).update(pickle.loads(zlib.decompress(state)))

    def unread(self, path) -> str | None:
        """Returns what to say about the files that DALI does not read, or None if it reads all.

        Their first bytes tell: phones name HEIC .jpg, too. Of many files, these are read of OPENED, evenly spaced, and
        of those with another suffix than .jpg and .png. path: of the split.
        """
        if odd := next((name for name in self.files if shown(name) != name), None):
            return f"{path}/{shown(odd)}: DALI does not read names that are not UTF-8"
        opened = [*dict.fromkeys([*self.files[::len(self.files) // OPENED + 1], *self.kinds])]
        with ThreadPoolExecutor(THREADS) as pool:
            unread = [*itertools.compress(opened, pool.map(_is_unread, (f"{path}/{name}" for name in opened)))]
        more = f" ({len(unread)} such files)" if len(unread) > 1 else ""
        return f"{path}/{unread[0]}{more}: DALI does not read {UNREAD}, whatever their names" if unread else None

    def of_rare_kinds(self, path) -> list[Path]:
        """Returns the first file of each kind in RARE_SUFFIXES. path: of the split."""
        first = {suffix: name for name, suffix in reversed(self.kinds.items())}
        return [Path(path, first[suffix]) for suffix in sorted(first.keys() & RARE_SUFFIXES)]


def _is_unread(path: str) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:  # an error shows when the image is read
        return (start := file.read(8)).startswith(b"GIF8") or start[4:] == b"ftyp"  # that of HEIC and AVIF
    return False


read_index = Listing


def source_name(path, index: Listing, sample: int) -> str:
    return index.files[sample]


def records(path, index: Listing, samples) -> Iterator[tuple[bytes, int]]:
    for number in samples:
        yield (Path(path) / index.files[number]).read_bytes(), int(index.labels[number])


def reader(slices, scratch: Path, **options):
    files = [f"{path}/{index.files[number]}" for path, index, samples in slices for number in samples]
    labels = np.concatenate([index.labels[samples] for _, index, samples in slices]).tolist()

    def read():
        from nvidia.dali import fn, types

        encoded, label = fn.readers.file(files=files, labels=labels, name="reader", **options)
        return encoded, fn.cast(label, dtype=types.INT64)

    return read
