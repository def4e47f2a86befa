"""A table of files and labels, such as labels.csv: the images of each split, and problems named with their lines."""
import csv
import os
import re
import shlex
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import UserError, listed
from data.class_folders import TRAIN_WORDS, VALIDATION_WORDS
from data.class_names import CONTROL, distinct, normal
from data.image_files import THREADS
from data.rows import Rows, rows, short
from data.set_aside import SetAside

NAMES = {"file": ("file", "path", "filename", "image"), "label": ("label", "class"), "split": ("split",)}  # of columns
WORDS = *TRAIN_WORDS, *VALIDATION_WORDS
DIVIDING = re.compile(  # other names of columns that divide the images
    r"(\w+[ _-])?(k[ _-]?)?(split|fold)s?([ _-]?\d+)?|(sub)?set|partition|usage|"
    r"(is[ _-]?)?(train|training|val|valid|validation|test|testing|holdout)([ _-]?(set|image))?")
SEVERAL = re.compile(r"\[.*\]|\{.*\}|\(.*,.*\)|.*[|;].*")  # labels in one cell
BETWEEN = re.compile(r"[\s,/+&]+")  # that separates labels in one cell, if each of them is also a label alone
NUMBER = re.compile(r"[-+]?\d*[.,]?\d+(e[-+]?\d+)?", re.IGNORECASE)
FEW = 10  # different numbers, which are classes however few rows there are
ONE_HOT = {"0", "1", "0.0", "1.0", "true", "false"}
MOST_PROBLEMS = 3  # problems in a message
MOST_COLUMNS = 8  # in a message


@dataclass(frozen=True, slots=True)
class Row:
    """An image of the table."""

    line: int  # number of the line where it begins, from 1
    file: str  # its path, relative to the folder of the table, or absolute
    label: str
    split: str  # as written, in lower case; "train" if the table has no such column


def read(source: Path, fraction: SetAside, label_column: str | None = None
         ) -> tuple[dict[str, list[Row]], list[str], str | None]:
    """Returns the rows of each split that a table has, in the order of their classes, and what to tell the user.

    Also returns the word and the column of the validation images, or None if it has none. Raises UserError.

    fraction: 1 if images for validation alone suffice. label_column: name of the column with the classes. Default: one
    of NAMES.
    """
    images, column = _read(source, label_column)
    by_word = defaultdict(list)
    for row in images:
        by_word["train" if row.split in TRAIN_WORDS else row.split].append(row)
    word = next((word for word in VALIDATION_WORDS if word in by_word), None)
    if fraction.is_everything and word and "train" not in by_word:  # test images alone
        by_word["train"], word = by_word.pop(word), None
    if "train" not in by_word:
        raise UserError(f"--source: {source} has no training images; --validation_fraction=1 prepares test images "
                        "alone, for --mode=evaluate")
    splits = {"train": by_word.pop("train")} | ({"validation": by_word.pop(word)} if word else {})
    _check_labels(source, splits, fraction)
    for part in splits.values():
        part.sort(key=lambda row: (row.label, row.file.split("/")))
    notes = [f"the column {column} divides the images"] * (column not in (None, "split"))
    unused = [f"not used: {len(rest):,} images of the split {other}" for other, rest in by_word.items()]
    return splits, notes + unused, word and f"{word} in the column {column}"


def _check_labels(source, splits: dict[str, list[Row]], fraction) -> None:
    """Raises UserError for labels that are spelled in two ways, that training lacks, or that are measured numbers."""
    known = set()
    for part in splits.values():
        lines = {}
        for row in part:
            lines.setdefault(row.label, row.line)
        names = distinct([*lines], f"--source: {source}", [*lines.values()])
        known = known or {*names}
        if unknown := [item for item in zip(lines.values(), names, strict=True) if item[1] not in known]:
            line, name = unknown[0]
            raise UserError(f"--source: {source}, line {line}: no training image has the label {short(name)!r}")
    images, numbers = len(splits["train"]), sum(bool(NUMBER.fullmatch(name)) for name in known)
    if not fraction.is_everything and numbers > max(FEW, images / 2):
        raise UserError(f"--source: {source}: the labels of {images:,} training images are {numbers:,} different "
                        "numbers; only classes can be trained, so give each image the name of a class")


def _read(source, label_column) -> tuple[Iterable[Row], str | None]:
    """Returns the rows, one for each file, and the name of the column that divides them, or None.

    Raises UserError, which names the lines with problems.
    """
    table, columns = _opened(source, label_column)
    written, of_cells = [], {}
    for line, cells in table:
        values = {what: cells[number] if number < len(cells) else "" for what, number in columns.items()}
        written.append(Row(line, values["file"], values["label"], values.get("split", "train").lower()))
        if problem := _problem_of_cells(table, cells, columns["file"]):
            of_cells[line] = problem
    with ThreadPoolExecutor(THREADS) as pool:
        paths = pool.map(lambda row: _found(source.parent, row.file), written)
    labels, images, problems = {row.label for row in written}, {}, []
    for row, path in zip(written, paths, strict=True):
        row = replace(row, file=path or row.file)
        first = images.setdefault(row.file, row)
        if problem := (_problem(row, first, labels) or of_cells.get(row.line)
                       or (not path and f"there is no file {normal(str(source.parent / short(row.file)))}")):
            problems.append(f"line {row.line}: {problem}")
    if problems:
        raise UserError(f"--source: {source}: {listed(problems, MOST_PROBLEMS, '; ', 'problems')}")
    return images.values(), table.header[1][columns["split"]] if "split" in columns else None


def _opened(source, label_column) -> tuple[Rows, dict[str, int]]:
    """Returns the rows, and the number of each column of NAMES that is there. Raises UserError."""
    tables, known = rows(source), NAMES | (
        {} if label_column is None else {"label": (label_column.lower(),)})
    for table in tables:
        line, header = table.header
        found = {what: [number for number, name in enumerate(header) if name.lower() in names]
                 for what, names in known.items()}
        if not (found["file"] and found["label"]):
            continue
        for numbers in found.values():
            _check_single(f"--source: {source}, line {line}", header, numbers)
        columns = {what: numbers[0] for what, numbers in found.items() if numbers}
        return table, columns | _dividing(table, columns)
    raise UserError(_no_header(max(tables, key=lambda table: len(table.header[1])), known))


def _check_single(where, header, numbers) -> None:
    """Raises UserError if several columns may be meant for the same."""
    if len(numbers) > 1:
        names = listed([repr(short(header[number])) for number in numbers], MOST_PROBLEMS, " and ")
        raise UserError(f"{where}: the columns {names} mean the same; remove or rename all but one")


def _no_header(table: Rows, known: dict[str, tuple[str, ...]]) -> str:
    """Returns what to say about a table without the columns for a file and a label. known: as NAMES."""
    line, header = table.header
    file, label = (f"{first} (or {', '.join(others)})" if others else first
                   for first, *others in (known["file"], known["label"]))
    said = (f"--source: {table.path}, line {line}: the table needs a header with the columns {file} and {label}, "
            "divided by commas, semicolons or tabs")
    _, cells = next(iter(table), (0, []))
    if len(header) > 2 and sum(cell.lower() in ONE_HOT for cell in cells) >= len(header) - 1:
        return f"{said}; a column for each class is not read: write the name of each image's class into a column label"
    said += f"; it has {listed([repr(short(name)) for name in header], MOST_COLUMNS) or 'none'}"
    others = [shlex.quote(short(name)) for name in header if name.lower() not in known["file"]]
    if not 0 < len(others) < len(header):
        return said
    return f"{said}; --label_column={others[0] if len(others) == 1 else 'NAME'} says which one has the classes"


def _dividing(table: Rows, columns: dict[str, int]) -> dict[str, int]:
    """Returns the number of the column that divides the images, if it is not called split. Raises UserError.

    It is one in which each word is that of a split, and which is called so or has both splits.
    """
    line, header = table.header
    words, others = _words(table, {*range(len(header))} - {*columns.values()})
    named = [number for number, name in enumerate(header) if DIVIDING.fullmatch(name.lower())]
    dividing = [number for number, found in words.items() if number in named
                or not (found.isdisjoint(TRAIN_WORDS) or found.isdisjoint(VALIDATION_WORDS))]
    own = [columns["split"]] if "split" in columns else []
    _check_single(f"--source: {table.path}, line {line}", header, own + dividing)
    if doubtful := [number for number in named if number in others and not own + dividing]:
        begins, word = others[doubtful[0]]
        raise UserError(f"--source: {table.path}, line {begins}: the column {header[doubtful[0]]!r} may divide the "
                        f"images, but {short(word)!r} is none of {', '.join(WORDS)}; write these "
                        "words into a column split, or remove this column")
    return {"split": dividing[0]} if dividing else {}


def _words(table: Rows, numbers: set[int]) -> tuple[dict[int, set[str]], dict[int, tuple[int, str]]]:
    """Returns the words of the columns that have those of splits alone, and of each other one the first other word.

    That is its line, and the word.
    """
    words, others = {number: set() for number in numbers}, {}
    for line, cells in table:
        for number in [*words]:
            word = cells[number] if number < len(cells) else ""
            words[number].add(word.lower())
            if word.lower() not in WORDS:
                others[number] = line, word
                del words[number]
        if not words:
            break
    return words, others


def _found(folder, written) -> str | None:
    """Returns a path as it is on this system, or None if there is no such file.

    Windows writes \\ for /, and macOS writes accents in Unicode's form NFD.
    """
    forms = dict.fromkeys(unicodedata.normalize(form, path) if form else path
                          for path in (written, written.replace("\\", "/")) for form in ("", "NFC", "NFD"))
    return next((os.path.normpath(path) for path in forms if path and os.path.isfile(folder / path)), None)


def _problem(row: Row, first: Row, labels: set[str]) -> str | None:
    """Returns what is wrong with a row, or None. first: the first row of the same file. labels: of all rows."""
    file, label = normal(short(row.file)), short(row.label)
    if not row.file:
        return "the file is empty"
    if not row.label:
        return f"{file} has no label"
    if CONTROL.search(row.label):
        return f"the label {label!r} of {file} has a control character or a line end; is a quotation mark missing?"
    parts = BETWEEN.split(row.label)
    if SEVERAL.fullmatch(row.label) or (len(parts) > 1 and labels.issuperset(parts)):
        return f"the label {label!r} of {file} is a list, but an image has one class here; write one name"
    if row.split not in WORDS:
        return f"the split {short(row.split)!r} of {file} is none of {', '.join(WORDS)}"
    if (normal(row.label), row.split) != (normal(first.label), first.split):
        what, here, there = ("label", label, short(first.label)) if normal(row.label) != normal(first.label) else (
            "split", row.split, first.split)
        return f"{file} has the {what} {here!r}, but {there!r} in line {first.line}"
    return None


def _problem_of_cells(table: Rows, cells: list[str], column: int) -> str | None:
    """Returns what is wrong with the cells of a row, or None. column: the number of that of the file."""
    names = table.header[1]
    used = max((number for number, cell in enumerate(cells, 1) if cell), default=0)
    if used > len(names) or len(cells) < len(names):
        return (f"{used or len(cells)} cells, but the header has {len(names)}"
                + f"; a text with a {table.delimiter!r} needs quotation marks" * (used > len(names)))
    inner = [line for cell in cells if "\n" in cell for line in cell.splitlines()[1:]]
    swallowed = (row for row in csv.reader(inner, delimiter=table.delimiter) if len(row) > column)
    if inner and any(_found(table.path.parent, row[column].strip()) for row in swallowed):
        return "a cell has the lines of other images; is a quotation mark missing?"
    return None
