"""The rows of a text table as people save it: some encodings, separators and first lines, and what is none of them."""
import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from common.errors import UsageError, UserError, one_line
from common.flags import decoded

DELIMITERS = ",;\t|"
SEPARATOR = re.compile(r'"?sep=(.)"?', re.IGNORECASE)  # the first line of a table for Excel
BLANK = f" {DELIMITERS}\r\n"
LONGEST = 80  # letters of a cell in a message
GZIP, ZIP, UTF_16 = b"\x1f\x8b", b"PK\3\4", (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class Rows:
    """A table, if this character separates its cells."""

    path: Path
    text: str
    delimiter: str
    before: int  # number of lines before the header

    @cached_property
    def header(self) -> tuple[int, list[str]]:
        """The number of its line, and its cells, which are none where this is not the delimiter."""
        try:
            return next(self._all(), (self.before + 1, []))
        except UserError:
            return self.before + 1, []

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        """Yields the number of the line where each row begins, and its cells. Raises UserError."""
        return islice(self._all(), 1, None)

    def _all(self):
        lines = islice(io.StringIO(self.text, newline=""), self.before, None)
        reader = csv.reader(lines, delimiter=self.delimiter, skipinitialspace=True, strict=True)
        begins = self.before + 1
        try:
            for cells in reader:
                if any(stripped := [cell.strip() for cell in cells]):
                    yield begins, stripped
                begins = self.before + reader.line_num + 1
        except csv.Error as error:
            raise UserError(f'--source: {self.path}, line {begins}: the quotation marks of the row that begins here do '
                            f'not match ({error}); a quotation mark in a text is written as ""') from None


def rows(path: Path) -> list[Rows]:
    """Returns a table as it is with each delimiter that it may have. Raises UserError, OSError."""
    text, delimiters, before = _text(path), DELIMITERS, 0
    for line in io.StringIO(text, newline=""):
        if separator := SEPARATOR.fullmatch(line.rstrip("\r\n")):
            delimiters = separator[1]
        elif line.strip(BLANK) and not line.startswith("#"):
            break
        before += 1
    return [Rows(path, text, delimiter, before) for delimiter in delimiters]


def _text(path) -> str:
    content = path.read_bytes()
    if content.startswith(ZIP):
        raise UserError(f"--source: {path} is a spreadsheet or a zip archive; save the table as CSV in UTF-8")
    try:
        content = gzip.decompress(content) if content.startswith(GZIP) else content
        text = content.decode("utf-16") if content.startswith(UTF_16) else decoded(content, path)
    except UsageError as error:
        raise UserError(f"--source: {error}") from None
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise UserError(f"--source: {path} is damaged: {one_line(error)}") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"--source: {path}, line {line}, has a NUL character; save the table as CSV in UTF-8")
    return text


def short(cell: str) -> str:
    """Returns the text of a cell for a message, cut if it is long."""
    return cell if len(cell) <= LONGEST else f"{cell[:LONGEST]}..."
