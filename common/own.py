"""MODULE:NAME, what a user has written: whether it is there, found without executing it."""
import ast
import os
import re
import sys

from common.errors import UserError

# What may bind names, or have modules found, that the source does not show.
DYNAMIC = re.compile(r"import\s*\*|__(getattr|path|dict)__|\b(globals|locals|vars|setattr|exec)\(|sys\.modules")


def search_here() -> None:
    """Has the current folder searched for modules last."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def check(flag: str, name: str) -> None:
    """Raises UserError if there is no module of MODULE:NAME, or if no such name occurs in it.

    It reads the sources and executes nothing. What they do not tell, such as what a compiled module has, or one that is
    imported already, is left to the import.
    """
    search_here()
    module, attribute = name.split(":")
    if module in sys.modules:
        return
    source, path, whole = "", None, ""
    for part in module.split("."):
        whole += f".{part}" if whole else part
        try:
            spec = next(filter(None, (finder.find_spec(whole, path) for finder in sys.meta_path)), None)
            found = spec.loader.get_source(whole) if spec and spec.loader else ""  # "": a folder without __init__.py
            tree = ast.parse(found or "")
        except Exception:  # such as KeyError for folders without __init__.py in one another
            return
        if found is None or (not spec and DYNAMIC.search(source)):
            return
        if not spec:
            raise UserError(f"{flag}={name}: ModuleNotFoundError: No module named {whole!r} in Python's path or the "
                            "current folder")
        source, path = found, spec.submodule_search_locations or []
    names = {str(getattr(node, field, "")).partition(".")[0] for node in ast.walk(tree)
             for field in ("id", "name", "asname", "module")}
    if attribute.partition(".")[0] not in names and not DYNAMIC.search(source):
        raise UserError(f"{flag}={name}: AttributeError: module {module!r} has no attribute {attribute!r}")
