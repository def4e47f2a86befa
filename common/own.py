"""MODULE:NAME, what a user has written: whether it is there, found without executing it."""
import ast
import os
import re
import sys
from collections.abc import Iterator

from common.errors import UserError

# What may bind names, or have modules found, that the source does not show.
DYNAMIC = re.compile(r"import\s*\*|__(getattr|path|dict)__|\b(globals|locals|vars|setattr|exec)\(|sys\.modules")


def search_here() -> None:
    """Has the current folder searched for modules last."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def check(flag: str, name: str) -> None:
    """Raises UserError if there is no module of MODULE:NAME, or if it binds no such name.

    It reads the sources and executes nothing. What they do not tell, such as what a compiled module has, is left to the
    import.
    """
    search_here()
    if problem := _problem(*name.split(":")):
        raise UserError(f"{flag}={name}: {problem}")


def _problem(module, attribute) -> str | None:
    source, path, parts = "", None, module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        try:
            spec = next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
            found = spec and (spec.loader.get_source(name) if spec.loader else "")  # "": a folder without __init__.py
        except Exception:  # such as KeyError for folders without __init__.py in one another
            return None
        if not spec and not DYNAMIC.search(source):
            return f"ModuleNotFoundError: No module named {name!r} in Python's path or the current folder"
        if found is None:
            return None
        source, path = found, spec.submodule_search_locations or []
    try:
        is_bound = DYNAMIC.search(source) or attribute.partition(".")[0] in _bound(ast.parse(source, spec.origin or ""))
    except SyntaxError as error:
        return f"SyntaxError: {error}"
    return None if is_bound else f"AttributeError: module {module!r} has no attribute {attribute!r}"


def _bound(tree: ast.AST) -> Iterator[str]:
    """Yields the names that a module binds, and those that its functions do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.ImportFrom):  # a package's own module is its attribute then
            yield (node.module or "").partition(".")[0]
        else:
            yield getattr(node, "name", "")
