"""Checks MODULE:NAME, a user's own function or class, before a training starts, without executing the module."""
import ast
import itertools
import os
import re
import sys

from common.errors import UserError

# Code by which a module may have names or submodules that its source does not show.
DYNAMIC = re.compile(r"import\s*\*|__(getattr|path|dict)__|\b(globals|locals|vars|setattr|exec)\(|sys\.modules")


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
