"""MODULE:NAME, what a user has written: checked without executing the module before a training starts, and loaded."""
import ast
import importlib
import itertools
import operator
import os
import re
import sys
import traceback

from common.errors import UserError, one_line

# Code by which a module may have names or submodules that its source does not show.
DYNAMIC = re.compile(r"import\s*\*|__(getattr|path|dict)__|\b(globals|locals|vars|setattr|exec)\(|sys\.modules")
FAILURES = Exception, SystemExit  # of the user's code, which may not end the process


def search_here() -> None:
    """Lets Python find modules in the current folder, after all other places."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def check(flag: str, name: str) -> None:
    """Raises UserError if there is no module of MODULE:NAME, or if no such name occurs in it.

    It reads the sources and executes nothing. What they do not tell, such as what a compiled module has, or one that is
    imported already, is left to the import.
    """
    search_here()
    module, attribute = name.split(":")
    source, path = "", None
    try:
        for part in itertools.accumulate(module.split("."), "{}.{}".format):
            spec = next(filter(None, (finder.find_spec(part, path) for finder in sys.meta_path)), None)
            if not spec:
                break
            source = spec.loader.get_source(part) if spec.loader else ""  # a folder without __init__.py
            path = spec.submodule_search_locations or []
        names = {str(getattr(node, field, "")).partition(".")[0] for node in ast.walk(ast.parse(source))
                 for field in ("id", "name", "asname", "module")}
    except Exception:  # such as TypeError for a compiled module, KeyError for nested folders without __init__.py
        return
    if module in sys.modules or DYNAMIC.search(source) or (spec and attribute.partition(".")[0] in names):
        return
    raise UserError(f"{flag}={name}: " + (
        f"AttributeError: module {module!r} has no attribute {attribute!r}" if spec else
        f"ModuleNotFoundError: No module named {part!r} in Python's path or the current folder"))


def load(flag: str, name: str):
    """Imports MODULE and returns its NAME. Raises UserError for whatever goes wrong, in the user's code, too."""
    search_here()
    module, _, attribute = name.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except FAILURES as error:
        raise UserError(f"{flag}={name}: {described(error)}") from None


def described(error: BaseException) -> str:
    """Returns an error of the user's code, and where it was raised, on one line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:]  # without the frame that called it
              if not frame.filename.startswith("<")]  # Python's import system
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(error)[:300]}{where}"
