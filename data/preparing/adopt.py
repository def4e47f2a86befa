"""Adopts a dataset made elsewhere, in place: writes the missing indexes and dataset.json.

The dataset is TFRecord as TF-slim and NVIDIA write ImageNet (train-00000-of-01024, validation-...), LMDB of Caffe
(folders whose names contain train and val), RecordIO (train*.rec, val*.rec), or one folder of images per class (train/,
val/).
"""
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import write_json
from data import class_folders, formats
from data.class_names import alike, distinct, normal
from data.dataset import Dataset, Split, check_class_folders, describe
from data.facts import of_folder
from data.formats.tfrecord import examples
from data.images import Rejected, Rules, added, store
from data.preparing.run import moments
from data.preparing.shards import MEASURED
from data.preparing.team import Team
from data.preparing.verify import Part, parts, records

SPLITS = {"train": "train", "validation": "val"}  # file names start with these; names of LMDB folders contain them
# Of files without records. A killed run leaves an index that is not complete.
SIDECAR_SUFFIXES = (".idx", ".idx.part", ".json", ".jsonl", ".txt", ".lst", ".crc32", ".md5", ".csv")
TEXTS = ("image/class/text", "image/class/synset")  # TFRecord features that name a class
MOST_CLASSES = 1_000_000  # a larger label is invalid


@dataclass
class Seen:
    """The content of some records."""

    labels: set[int] = field(default_factory=set)
    texts: set[tuple[str, int, str]] = field(default_factory=set)  # (feature, label, text) of TFRecords
    histogram: list[int] = field(default_factory=list)  # of the pixels of the measured images

    def __add__(self, other: "Seen") -> "Seen":
        return Seen(self.labels | other.labels, self.texts | other.texts, added(self.histogram, other.histogram))


def adopt(folder: Path, classes_file: Path | None, team: Team) -> int:
    """Adopts a dataset and returns the exit code.

    Raises UserError if it cannot be adopted; dataset.json is not written then.
    """
    kind, paths = team.on_rank_0(lambda: _find(folder))
    named = team.on_rank_0(lambda: _named(kind, paths, classes_file))
    everything = [path for split in paths.values() for path in split]
    samples = dict(zip(everything, team.map(everything, lambda path: _index(kind, path)), strict=True))
    splits = {name: Split(kind, tuple(split), tuple(samples[path] for path in split))
              for name, split in paths.items()}
    if kind == "folder":  # the names of its folders are the labels
        splits = {name: split.with_indexes(named) for name, split in splits.items()}
        team.on_rank_0(lambda: check_class_folders(folder, named, splits.values()))
    stride = max(1, splits["train"].samples // MEASURED)
    units = [(part, stride if name == "train" else 0) for name, split in splits.items() for part in parts(split)]
    seen = team.work(units, lambda unit: _scan(*unit, folder, team), sum(split.samples for split in splits.values()),
                     name="reading")
    trained = len(parts(splits["train"]))
    train = sum(seen[:trained], Seen())
    validation = sum(seen[trained:], Seen())
    for line in team.on_rank_0(lambda: _write_description(folder, kind, splits, train, validation, named)):
        team.log(line)
    return 0


def _find(folder) -> tuple[str, dict[str, list[Path]]]:
    """Returns the format of the dataset in a folder, or one level below it, and the files of each split."""
    if not folder.is_dir():
        raise UserError(f"--output: there is no folder {folder}")
    if (folder / "dataset.json").exists():
        raise UserError(f"--adopt: {folder} already contains dataset.json; remove it to adopt the dataset again")
    entries = sorted([*folder.iterdir(), *folder.glob("*/*")])
    files = [path for path in entries if path.is_file() and not path.name.endswith(SIDECAR_SUFFIXES)]
    databases = {name: [path for path in entries if word in path.name.lower() and (path / "data.mdb").is_file()]
                 for name, word in SPLITS.items()}
    recordio, tfrecord = ({name: [path for path in files if path.name.startswith(word)
                                  and (path.suffix == ".rec") == wanted] for name, word in SPLITS.items()}
                          for wanted in (True, False))
    train, validation, _ = class_folders.layout(folder)
    if all(databases.values()):
        return "lmdb", databases
    if all(recordio.values()):
        return "recordio", recordio
    if validation and class_folders.class_names(train):
        return "folder", {"train": [train], "validation": [validation]}
    if all(tfrecord.values()):
        return "tfrecord", tfrecord
    raise UserError(f"--adopt: {folder} contains no dataset of a known format: TFRecord (train*, val*), RecordIO "
                    "(train*.rec, val*.rec), LMDB (*train*/data.mdb, *val*/data.mdb) or one folder of images per "
                    "class (train/, val/)")


def _index(kind, path) -> int:
    """Returns the number of records in a file, after writing its index if it has none. Raises OSError, ValueError."""
    module = formats.get(kind)
    index_file = module.index_path(path)
    if index_file and not index_file.exists():
        try:
            module.make_index(path)
        except ValueError as error:
            raise UserError(f"--adopt: {error}") from None
    count = len(module.read_index(path))
    if not count:
        raise UserError(f"--adopt: {path} contains no records; it is truncated, or not part of a dataset")
    return count


def _scan(part: Part, stride: int, folder, team) -> Seen:
    """Collects a part's labels, and measures every `stride`-th record of the split unless `stride` is 0."""
    seen = Seen()
    before = int(part.split.file_starts[part.file])
    for number, label, texts, image in _labelled(part):
        seen.labels.add(label)
        seen.texts |= {(feature, label, text) for feature, text in texts.items()}
        position = before + number
        if stride and position % stride == 0 and position // stride < MEASURED:
            with contextlib.suppress(Rejected):  # --verify reports it
                seen.histogram = added(seen.histogram, store(image(), Rules(), measure=True).histogram)
        team.beat(1)
    return seen


def _labelled(part) -> Iterator[tuple]:
    """Yields (record number, label, texts by feature, function that returns the image) of each record.

    Raises UserError if a record is bad.
    """
    if part.split.format == "tfrecord":
        yield from _examples(part)
    elif part.split.format == "folder":  # labels are known without reading the images
        listing = part.split.entries[part.file]
        for number in range(part.start, part.stop):
            yield number, int(listing.labels[number]), {}, (part.path / listing.files[number]).read_bytes
    else:
        for number, record in records(part):
            if isinstance(record, str):
                raise UserError(f"--adopt: {part.path}, record {number}: {record}")
            yield number, record[1], {}, lambda record=record: record[0]


def _examples(part) -> Iterator[tuple]:
    numbers = np.arange(part.start, part.stop)
    try:
        for number, (image, label, features) in zip(
                numbers, examples(part.path, part.split.entries[part.file], numbers), strict=True):
            texts = {name: normal(features[name].bytes_list.value[0].decode(errors="replace")) for name in TEXTS
                     if features[name].bytes_list.value}
            yield int(number), label, texts, lambda image=image: image
    except ValueError as error:
        raise UserError(f"--adopt: {error}") from None


def _write_description(folder, kind, splits, train, validation, named) -> list[str]:
    """Writes dataset.json on rank 0 and returns the lines to print."""
    least = min(train.labels | validation.labels)
    last = max(train.labels)
    if least < 0 or last > MOST_CLASSES:
        raise UserError(f"--adopt: the labels in {folder} run from {least} to {last}; they must start at 0 or 1 "
                        f"and be at most {MOST_CLASSES:,}")
    first = 1 if least == 1 and len(named or ()) <= last else 0  # label 0 may have a name, but no images
    if named and len(named) <= last - first:
        raise UserError(f"--classes lists {len(named)} classes, but the labels run from {first} to {last}")
    classes = named or _described(train.texts, range(first, last + 1))
    strange = [label for label in validation.labels if not first <= label < first + len(classes)]
    if strange:
        raise UserError(f"--adopt: the validation split contains label {min(strange)}, but training labels run from "
                        f"{first} to {first + len(classes) - 1}")
    if not train.histogram:
        raise UserError(f"--adopt: none of {MEASURED} sampled training images in {folder} can be decoded")
    mean, std = moments(train.histogram)
    splits = {name: split.with_indexes() for name, split in splits.items()}
    dataset = Dataset(folder, kind, classes, **splits, mean=mean, std=std, first_label=first)
    lines = [*alike(classes), *of_folder(dataset)]
    write_json(folder / "dataset.json", describe(dataset), durable=True)
    empty = [name for label, name in enumerate(classes, first) if label not in train.labels]
    return lines + [f"no training images in class {name!r}" for name in empty[:3]] + [
        f"{folder}: adopted {dataset.train.samples:,} training and {dataset.validation.samples:,} validation images of "
        f"{len(classes)} classes in {sum(len(split.paths) for split in splits.values())} files ({kind})"]


def _named(kind, paths, classes_file) -> tuple[str, ...] | None:
    """Returns the class names in label order from a file or from the folders, or None. Raises UserError, OSError."""
    if classes_file:
        lines = classes_file.read_text("utf-8", "surrogateescape").lstrip("\ufeff").split("\n")
        named = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
        if wide := [number for number, line in named.items() if "\0" in line]:
            raise UserError(f"--classes: {classes_file}, line {wide[0]}, has a NUL character; save the file as UTF-8")
        return distinct([*named.values()], f"--classes: {classes_file}", [*named])
    if kind != "folder":
        return None
    return distinct(class_folders.class_names(paths["train"][0]), paths["train"][0])


def _described(texts, labels) -> tuple[str, ...]:
    """Returns the class names from the records' texts if each class has its own, else numbers."""
    for feature in TEXTS:
        named = [(label, text) for named_by, label, text in sorted(texts) if named_by == feature and label in labels]
        if [label for label, _ in named] == [*labels] and len({text for _, text in named}) == len(named):
            return tuple(text for _, text in named)
    return tuple(map(str, labels))
