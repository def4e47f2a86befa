"""What a dataset is made from: one module a source."""
import importlib

BUILT_IN = ("digits", "glyphs")


def version(name: str) -> int:
    """The number of what a built-in source makes; a new one whenever its bytes change."""
    return importlib.import_module(f"data.sources.{name}").VERSION


def built_in(name: str):
    """A built-in source, as data.sources.source.Source."""
    return getattr(importlib.import_module(f"data.sources.{name}"), name)()
