"""Copies a dataset to a local disk of this node, once for all of its workers."""
import hashlib
import shutil
from pathlib import Path

from common.activity import startup
from common.errors import UserError
from common.files import flush, full_disk_named, private_folder
from common.locks import locked
from common.screen import Counter
from data.dataset import Dataset, Split
from data.image_files import walk

CHUNK = 16 << 20


def stage(dataset: Dataset, folder: Path, sizes: dict[str, tuple[int, int]] | None = None) -> Dataset:
    """Copies a dataset into this user's private folder in `folder` and returns the copy.

    The node's first worker copies while the others wait for its lock. An interrupted copy continues where it stopped,
    even within a file. A complete copy is reused as long as the original files keep their sizes and times. Raises
    UserError if the disk is too small or as `private_folder`, and OSError if the disk fails.

    sizes: from `files`, if another worker has called it.
    """
    sizes = sizes or files(dataset)
    identity = "\n".join(f"{file} {size} {changed}" for file, (size, changed) in sizes.items())
    digest = hashlib.sha256(f"{dataset.folder.resolve()}\n{identity}".encode(errors="surrogateescape")).hexdigest()
    target = private_folder(folder) / f"{dataset.folder.name}-{digest[:12]}"
    target.mkdir(exist_ok=True)
    with locked(Path(f"{target}.lock"), wait=True, needed=True), full_disk_named(folder):
        missing = {file: size - _copied(target, file) for file, (size, _) in sizes.items()
                   if not (target / file).exists()}
        needed = sum(missing.values())
        free = shutil.disk_usage(target).free
        if needed > free:
            raise UserError(f"--stage_dir: {folder} has {free / 1e9:.3f} GB free, but the copy of {dataset.folder} "
                            f"still needs {needed / 1e9:.3f} GB; make room, or train without --stage_dir")
        if missing:
            with Counter("staging", needed, "MB", scale=1e6, is_hidden=startup.is_silent) as counter:
                for file in missing:
                    _copy(dataset.folder / file, target / file, counter)
    return dataset.moved_to(target)


def files(dataset: Dataset) -> dict[str, tuple[int, int]]:
    """Returns size and time of change, in ns, of each of a dataset's files, by its path in the dataset's folder.

    dataset.json comes last.
    """
    paths = [file for split in (dataset.train, dataset.validation) for path in split.paths
             for file in _shard_files(split, path)]
    if (dataset.folder / "dataset.json").exists():
        paths.append(dataset.folder / "dataset.json")
    states = [path.stat() for path in paths]
    return {str(path.relative_to(dataset.folder)): (state.st_size, state.st_mtime_ns)
            for path, state in zip(paths, states, strict=True)}


def _shard_files(split: Split, path: Path) -> list[Path]:
    if split.format == "folder" and (listing := split.entries[0]).table:
        if outside := next((file for file in listing.files if file.startswith("../")), None):
            raise UserError(f"--stage_dir: {outside} lies outside of the folder of {listing.table}; remove the flag, "
                            f"or {split.conversion()}")
        return [path / file for file in listing.files]
    if path.is_dir():
        return [path / file for file in walk(path)[0] if file != "lock.mdb"]
    index = split.kind.index_path(path)
    return [path, index] if index else [path]


def _copied(target, file) -> int:
    part = Path(f"{target / file}.part")
    return part.stat().st_size if part.exists() else 0


def _copy(source: Path, target: Path, counter: Counter) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(f"{target}.part")
    with open(source, "rb") as reading, open(part, "ab") as writing:
        reading.seek(writing.tell())
        while chunk := reading.read(CHUNK):
            writing.write(chunk)
            counter.add(len(chunk))
    if part.stat().st_size != source.stat().st_size:
        raise UserError(f"--stage_dir: {source} changed while it was copied; start again")
    flush(part)
    part.rename(target)
