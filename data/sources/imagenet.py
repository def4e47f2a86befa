"""Source: ImageNet's original archives, as downloaded, in one folder. Nothing is unpacked.

    ILSVRC2012_img_train.tar        contains one archive per class: n01440764.tar, ...
    ILSVRC2012_img_val.tar          contains 50,000 images
    ILSVRC2012_devkit_t12.tar.gz    contains the labels of these images. A folder with its unpacked content works, too

Labels are indexes into the sorted list of the classes' WordNet ids, as everywhere except in ImageNet's own kit.
"""
import io
import re
import tarfile
from pathlib import Path

from common.errors import UserError
from data.class_names import distinct
from data.preparing.team import Team
from data.sources.source import Listed, members

TRAIN_TAR, VALIDATION_TAR, KIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12"
TRUTH = re.compile(r"ILSVRC20\d\d(_clsloc)?_validation_ground_truth\.txt")
META, MAP = "meta.mat", "map_clsloc.txt"
NUMBERED = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")


def is_imagenet(source: Path) -> bool:
    """Returns whether a folder is meant as this source, that is, whether it holds a part of it."""
    return any((source / name).exists() for name in (TRAIN_TAR, VALIDATION_TAR, f"{KIT}.tar.gz", KIT))


def imagenet(source: Path, team: Team) -> Listed:
    """Lists the images. The ranks split the classes' archives among them. Raises UserError if a part is missing."""
    archives, shown, rows = team.on_rank_0(lambda: _outer(source))
    inner = team.map(archives, lambda archive: _members(source / TRAIN_TAR, *archive))
    names = [name for name, _, _ in archives]
    label = {name: number for number, name in enumerate(names)}
    train = members(str(source / TRAIN_TAR), [row for part in inner for row in part],
                    [number for number, part in enumerate(inner) for _ in part])
    if not len(train):
        raise UserError(f"--source: {source / TRAIN_TAR} contains no images")
    unknown = sorted({*shown} - {*names})
    if unknown:
        raise UserError(f"--source: {source / TRAIN_TAR} has no {unknown[0]}.tar, but {VALIDATION_TAR} has images of "
                        "this class")
    validation = members(str(source / VALIDATION_TAR), rows, [label[name] for name in shown])
    return Listed(distinct(names, f"--source: {source / TRAIN_TAR}"), {"train": train, "validation": validation})


def _outer(source) -> tuple[list, list[str], list]:
    """Returns the classes' archives, the class of each validation image, and the validation images.

    Archives and images are (name, offset, size), in the order of their names.
    """
    for name in (TRAIN_TAR, VALIDATION_TAR):
        if not (source / name).is_file():
            raise UserError(f"--source: {source} has no {name}, a part of ImageNet; download it to this folder")
    classes = _kit(source)
    archives = sorted((Path(name).stem, offset, size) for name, offset, size in _listing(source / TRAIN_TAR)
                      if name.endswith(".tar"))
    if not archives:
        raise UserError(f"--source: {source / TRAIN_TAR} contains no class archives (n01440764.tar, ...)")
    rows = sorted((Path(name).name, offset, size) for name, offset, size in _listing(source / VALIDATION_TAR))
    if len(rows) != len(classes):
        raise UserError(f"--source: {VALIDATION_TAR} contains {len(rows)} images, but the development kit has labels "
                        f"for {len(classes)}")
    shown = []
    for name, _, _ in rows:
        number = NUMBERED.fullmatch(name)
        if not number or not 1 <= int(number[1]) <= len(classes):
            raise UserError(f"--source: {VALIDATION_TAR} contains {name}, but the development kit has no label for it")
        shown.append(classes[int(number[1]) - 1])
    return archives, shown, rows


def _members(path, name, offset, size) -> list[tuple[str, int, int]]:
    """Returns the images of a class, whose archive lies at this offset of the training archive."""
    return [(f"{name}/{Path(member).name}", start, length)
            for member, start, length in _listing(path, offset, offset + size)]


def _listing(path, start=0, end=None) -> list[tuple[str, int, int]]:
    """Returns name, offset and size of the files in an archive, which starts at byte `start` of the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(start)
        try:
            with tarfile.open(fileobj=file, mode="r:", errorlevel=1) as archive:
                found = [(member.name, member.offset_data, member.size) for member in archive if member.isreg()]
                stopped = archive.offset
        except tarfile.TarError as error:
            raise UserError(f"{path} is not a tar archive or is damaged ({error}); download it again") from None
        file.seek(stopped)
        closed = stopped == (end or size) or file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    # tarfile treats a damaged header as the end
    if not closed or max((offset + length for _, offset, length in found), default=0) > min(end or size, size):
        raise UserError(f"{path}: the archive is truncated or damaged; download it again")
    return found


def _kit(source) -> list[str]:
    """Returns the WordNet id of each validation image, in the order of their numbers, from the development kit."""
    files = _kit_files(source)
    truth = next((files[name] for name in sorted(files) if TRUTH.fullmatch(name)), None)
    if truth is None:
        raise UserError(f"--source: {source} has neither {KIT}.tar.gz (ImageNet's development kit) nor a folder with "
                        "data/ILSVRC2012_validation_ground_truth.txt; download the kit to this folder")
    if META in files:
        names = _meta(files[META])
    elif MAP in files:
        lines = [line.split() for line in files[MAP].decode(errors="replace").splitlines() if line.strip()]
        names = {int(words[1]): words[0] for words in lines}
    else:
        raise UserError(f"--source: ImageNet's development kit in {source} has neither {META} nor {MAP}")
    try:
        return [names[int(line)] for line in truth.split()]
    except (KeyError, ValueError) as error:
        raise UserError(f"--source: ImageNet's development kit in {source} has no class {error}") from None


def _kit_files(source) -> dict[str, bytes]:
    """Returns the relevant files of the kit by name, from its archive or from a folder."""
    def wanted(name):
        return name in (META, MAP) or TRUTH.fullmatch(name)

    packed = source / f"{KIT}.tar.gz"
    if packed.is_file():
        try:
            with tarfile.open(packed) as archive:
                return {Path(member.name).name: archive.extractfile(member).read() for member in archive
                        if member.isreg() and wanted(Path(member.name).name)}
        except (tarfile.TarError, EOFError) as error:
            raise UserError(f"{packed} is not a tar archive or is damaged ({error}); download it again") from None
    paths = [path for pattern in ("data/*", "*/data/*") for path in source.glob(pattern)]
    return {path.name: path.read_bytes() for path in paths if path.is_file() and wanted(path.name)}


def _meta(content: bytes) -> dict[int, str]:
    """Returns the WordNet id of each class number, from meta.mat."""
    from scipy.io import loadmat

    try:
        synsets = loadmat(io.BytesIO(content), squeeze_me=True)["synsets"]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    except Exception as error:  # scipy raises errors of any type for a damaged file
        raise UserError(f"--source: {META} of ImageNet's development kit cannot be read: {error}") from None
