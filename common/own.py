"""MODULE:NAME, what a user has written: how it is spelled, checked before anything executes, loaded and called."""
import contextlib
import importlib
import itertools
import operator
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError, one_line

SPELLING = re.compile(r"[\w.]+:[\w.]+")
# Code by which a module may have names or submodules that its source does not show.
DYNAMIC = re.compile(r"import\s*\*|__(getattr|path|dict)__|\b(globals|locals|vars|setattr|exec)\(|sys\.modules")
FAILURES = Exception, SystemExit  # of the user's code, which may not end the process


def respelled(text: str) -> str:
    """Returns what to give instead of a path to a module, or of a name with a hyphen, for the end of a message.

    It is empty for MODULE:NAME, and for what is nothing like that.
    """
    path, _, name = text.partition(":")
    folder, file = os.path.split(path.rstrip("/").removesuffix(".py"))
    module = file.replace("-", "_")
    is_path = "/" in path or path.endswith(".py")
    if not module.isidentifier() or not (is_path or (name and module != file)):
        return ""
    within = [*Path(os.path.relpath(folder or ".")).parts, module]
    is_found = all(map(str.isidentifier, within))
    meant = f"{'.'.join(within) if is_found else module}:{name.removesuffix('()') or 'NAME'}"
    renamed = f"; rename {file}.py to {module}.py, because Python's names have no hyphens" if module != file else ""
    return f"{renamed}; give {meant}" + ("" if is_found else f", and {folder} in PYTHONPATH")


def check(flag: str, name: str) -> None:
    """Raises UserError if there is no module of MODULE:NAME, or if no such name occurs in it.

    Python finds modules in the current folder, too, after all other places. The sources are read, and nothing is
    executed. What they do not tell, such as what a compiled module has, is left to the import.
    """
    with calling(f"{flag}={name}"):
        _check(name)


def load(flag: str, name: str):
    """Imports MODULE and returns its NAME. Raises UserError for whatever goes wrong, in the user's code, too."""
    with calling(f"{flag}={name}"):
        _check(name)
        importlib.import_module(name.partition(":")[0])
        return _attribute(name)


def _check(name) -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, attribute = name.split(":")
    if module in sys.modules:
        _attribute(name)
        return
    source, path = "", None
    try:
        for part in itertools.accumulate(module.split("."), "{}.{}".format):
            spec = next(filter(None, (finder.find_spec(part, path) for finder in sys.meta_path)), None)
            if not spec:
                break
            source = spec.loader.get_source(part) if spec.loader else ""  # a folder without __init__.py
            path = spec.submodule_search_locations or []
        is_named = re.search(rf"\b{attribute.partition('.')[0]}\b", source)
    except Exception:  # such as TypeError for a compiled module, KeyError for nested folders without __init__.py
        return
    if DYNAMIC.search(source) or (spec and is_named):
        return
    raise _lacking(name, spec.origin) if spec else UserError(
        f"ModuleNotFoundError: No module named {part!r} in Python's path or the current folder{respelled(name)}")


def _attribute(name):
    """Returns what MODULE:NAME names in an imported module. Raises UserError."""
    module, _, attribute = name.partition(":")
    try:
        return operator.attrgetter(attribute)(sys.modules[module])
    except AttributeError:
        raise _lacking(name, getattr(sys.modules[module], "__file__", None)) from None


def _lacking(name, file: str | None) -> UserError:
    """Returns the error for a module without such a name. file: of the module, which may not be the one that is meant.
    """
    module, _, attribute = name.partition(":")
    meant = Path(f"{module.replace('.', '/')}.py")
    is_hidden = meant.is_file() and not (file and os.path.exists(file) and meant.samefile(file))
    found = f"; Python finds it in {file}" * bool(file) + f", which hides ./{meant}: rename that" * is_hidden
    return UserError(f"AttributeError: module {module!r} has no attribute {attribute!r}{found}")


@contextlib.contextmanager
def calling(what: str) -> Iterator[None]:
    """Context manager for calls of the user's code. If that changes the working folder, it is changed back at the end.

    Raises UserError, whose message begins with `what`, for whatever goes wrong in it.
    """
    folder = os.open(".", os.O_PATH)
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
    except FAILURES as error:
        raise UserError(f"{what}: {described(error)}") from None
    finally:
        os.fchdir(folder)
        os.close(folder)


def described(error: BaseException) -> str:
    """Returns an error of the user's code, and where it was raised, on one line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[2:]  # without `calling` and what called it
              if not frame.filename.startswith(("<", importlib.__file__))]  # Python's import system
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(error)[:300]}{where}"
