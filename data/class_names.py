"""The names of classes: one form and one line for each, whatever they come from, and what sets two names apart."""
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence

from common.errors import UserError, listed

CONTROL = re.compile(r"[\0-\x1f\x7f-\x9f\u2028\u2029]")  # also all at which str.splitlines ends a line
INVISIBLE = re.compile(  # letters without a shape that are not in Unicode's category of format characters, Cf
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
MOST_NAMES = 5  # names that look alike in a line, and groups of them


def normal(name: str) -> str:
    """Returns a name in Unicode's form NFC, with its control characters and line ends escaped, such as \\n.

    macOS writes accents in the form NFD, in which é is two characters. Programs compare and store names in this form.
    """
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], unicodedata.normalize("NFC", name))


def distinct(names: Sequence[str], where, lines: Sequence[int] = ()) -> tuple[str, ...]:
    """Returns the normal forms of class names. Raises UserError if two different names have the same.

    A name may occur twice, as crane does among ImageNet's classes. where: the file or folder with these names, for the
    message. lines: the number of the line of each, in a file.
    """
    spelled, first = tuple(map(normal, names)), {}
    for number, name in enumerate(spelled):
        other = first.setdefault(name, number)
        if names[other] != names[number]:
            places = f", lines {lines[other]} and {lines[number]}" if lines else ""
            raise UserError(f"{where}{places}: {names[other]!a} and {names[number]!a} are two spellings of one class, "
                            f"{name!r}; use one of them, or rename one class")
    return spelled


def alike(names: Iterable[str]) -> list[str]:
    """Returns a line about names that are easily taken for each other, or nothing if there are none."""
    groups = defaultdict(list)
    for name in names:
        groups[_without_case_and_blanks(name)].append(name)
    told = [_told_apart(group) for group in groups.values() if len(group) > 1]
    return [f"names of classes differ at most in case, blanks or invisible letters: "
            f"{listed(told, MOST_NAMES, '; ', 'such groups')}"] if told else []


def _without_case_and_blanks(name) -> str:
    return "".join(_visible(unicodedata.normalize("NFKC", name).casefold()).split())


def _visible(name) -> str:
    return "".join(letter for letter in INVISIBLE.sub("", name) if unicodedata.category(letter) != "Cf")


def _told_apart(names: Sequence[str]) -> str:
    """Returns names such that a reader sees their difference: as code points if they look the same."""
    look_alike = len({*map(_visible, names)}) < len(names)
    return listed([*map(ascii if look_alike else repr, names)], MOST_NAMES, " and ")
