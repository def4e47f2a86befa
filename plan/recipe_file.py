"""Reads flag files. A recipe is one whose comments say where its settings come from and what the paper reports."""
import difflib
from pathlib import Path

from common.errors import UsageError
from common.flags import file_text

RECIPES = Path(__file__).parents[1] / "launch" / "recipes"


def recipe_path(name: str) -> Path:
    """Returns the file of a recipe: `name` is a file, or its name in launch/recipes. Raises UsageError."""
    for path in (Path(name).expanduser(), RECIPES / name, RECIPES / f"{name}.flags"):
        if path.is_file():
            return path.absolute()
    names = {path.stem: str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.rglob("*.flags")}
    close = difflib.get_close_matches(Path(name).stem, names, 1, 0.5)
    suggestion = f"did you mean {names[close[0]]}?" if close else "launch/recipes/README.md lists the recipes"
    raise UsageError(f"there is no recipe {name}; {suggestion}")


def read(path: Path) -> dict[str, str]:
    """Reads a recipe: its title, the fields of its comment (Row, Reported, Rehearsed, ...), its flags."""
    fields, last = {}, "title"
    for line in file_text(path).splitlines():
        if line.startswith("--"):
            name, _, value = line[2:].partition("=")
            fields[name] = value
        elif line.startswith("#   "):
            fields[last] = f"{fields.get(last, '')} {line[4:]}".strip()
        elif line.startswith("# "):
            last, separator, value = line[2:].partition(": ")
            if not fields or not separator:
                last, value = "title", line[2:]
            fields[last] = value
    return fields


def flags_in(text: str) -> dict[str, str]:
    """Returns the value of each flag in the text of a run's flags.txt."""
    values = {}
    for line in text.splitlines():
        name, separator, value = line.strip().removeprefix("--").partition("=")
        if line.startswith("--") and separator:
            values[name] = value
        elif line.startswith("--"):
            values[name.removeprefix("no")] = str(not name.startswith("no")).lower()
    return values
