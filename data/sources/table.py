"""Source: a table of files and labels, such as labels.csv."""
import csv
import io
import os
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError, listed
from common.flags import file_text
from data.formats.folder import FRACTION, THREADS, TRAIN, VALIDATION
from data.preparing.team import Team
from data.sources.image_folder import divided
from data.sources.source import Listed, files

NAMES = {"file": ("file", "path", "filename", "image"), "label": ("label", "class"), "split": ("split",)}  # of columns
DELIMITERS = ",;\t"
SHOWN = 3  # problems in a message


@dataclass(frozen=True)
class Row:
    """An image of the table."""

    line: int  # number of its line, from 1
    file: str  # its path, relative to the folder of the table, or absolute
    label: str
    split: str  # as written, in lower case; "train" if the table has no such column


def table(source: Path, fraction: float, team: Team) -> Listed:
    """Lists the images of a table in the order that they have in folders of classes.

    fraction: fraction of each class for validation, if the table has no validation images. Raises UserError.
    """
    rows, lines = team.on_rank_0(lambda: _splits(source, fraction))
    classes = sorted({row.label for row in rows["train"]})
    labels = {name: label for label, name in enumerate(classes)}
    splits = {split: files(str(source.parent), [row.file for row in chosen], [labels[row.label] for row in chosen])
              for split, chosen in rows.items()}
    for line in lines:
        team.log(line)
    if "validation" not in splits:
        splits = divided(splits["train"], splits["train"].names, fraction)
    return Listed(tuple(classes), splits)


def _splits(source, fraction) -> tuple[dict[str, list[Row]], list[str]]:
    """Returns the sorted rows of each split that the table has, and what to tell the user."""
    by_word = defaultdict(list)
    for row in sorted(_read(source), key=lambda row: (row.label, row.file.split("/"))):
        by_word["train" if row.split in TRAIN else row.split].append(row)
    word = next((word for word in VALIDATION if word in by_word), None)
    if "train" not in by_word:
        raise UserError(f"--source: {source} has no training images")
    if word and fraction:
        raise UserError(f"--validation_fraction: {source} already has validation images ({word}); remove this flag")
    if not word and not fraction:
        raise UserError(f"--source: {source} has no validation images; give the fraction of each class to use for "
                        f"validation, such as --validation_fraction={FRACTION:g}")
    splits = {"train": by_word.pop("train")} | ({"validation": by_word.pop(word)} if word else {})
    known = {row.label for row in splits["train"]}
    if unknown := [row for row in splits.get("validation", ()) if row.label not in known]:
        raise UserError(f"--source: {source}, line {unknown[0].line}: no training image has the label "
                        f"{unknown[0].label!r}")
    return splits, [f"note: not used: {len(rows):,} images of the split {word}" for word, rows in by_word.items()]


def _read(source) -> Iterable[Row]:
    """Returns the rows, one for each file. Raises UserError, which names the lines with problems."""
    reader, columns = _opened(source)
    found, problems = {}, []
    try:
        for cells in reader:
            values = {what: cells[number].strip() if number < len(cells) else "" for what, number in columns.items()}
            if not any(cells):
                continue
            values["split"] = values.get("split", "train").lower()
            values["file"] = _path(source.parent, values["file"])
            row = Row(reader.line_num, **values)
            first = found.setdefault(row.file, row)
            if problem := _problem(row, first):
                problems.append((row.line, problem))
    except csv.Error as error:
        raise UserError(f"--source: {source}, line {reader.line_num}: {error}") from None
    with ThreadPoolExecutor(THREADS) as pool:
        are_there = pool.map(lambda file: os.path.isfile(source.parent / file), found)
        problems += [(row.line, f"there is no file {source.parent / row.file}")
                     for row, is_there in zip(found.values(), are_there, strict=True) if row.file and not is_there]
    if problems:
        lines = [f"line {line}: {problem}" for line, problem in sorted(problems)]
        raise UserError(f"--source: {source}: {listed(lines, SHOWN, '; ', 'problems')}")
    return found.values()


def _opened(source) -> tuple:
    """Returns a csv.reader of the lines below the header, and the number of each column of NAMES that is there."""
    text = file_text(source)
    for delimiter in DELIMITERS:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
        header = [cell.strip().lower() for cell in next(reader, [])]
        columns = {what: next((header.index(name) for name in names if name in header), None)
                   for what, names in NAMES.items()}
        if columns["file"] is not None and columns["label"] is not None:
            return reader, {what: number for what, number in columns.items() if number is not None}
    raise UserError(f"--source: {source}, line 1: the table needs a header with the columns file (or "
                    f"{', '.join(NAMES['file'][1:])}) and label (or class), divided by commas, semicolons or tabs")


def _path(folder, written) -> str:
    """Returns a path as it is on this system: Windows writes \\ for /."""
    if "\\" in written and not (folder / written).exists():
        written = written.replace("\\", "/")
    return os.path.normpath(written) if written else ""


def _problem(row: Row, first: Row) -> str | None:
    """Returns what is wrong with a row, or None. first: the first row of the same file."""
    if not row.file:
        return "the file is empty"
    if not row.label:
        return f"{row.file} has no label"
    if row.split not in (*TRAIN, *VALIDATION):
        return f"the split {row.split!r} of {row.file} is none of {', '.join((*TRAIN, *VALIDATION))}"
    if (row.label, row.split) != (first.label, first.split):
        what, here, there = ("label", row.label, first.label) if row.label != first.label else (
            "split", row.split, first.split)
        return f"{row.file} has the {what} {here!r}, but {there!r} in line {first.line}"
    return None
