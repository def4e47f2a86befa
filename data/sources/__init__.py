"""Sources of datasets: one module per source."""
import importlib

BUILT_IN = ("digits", "glyphs")


def version(name: str) -> int:
    """Returns the version of a built-in source. It changes whenever the source's bytes change."""
    return importlib.import_module(f"data.sources.{name}").VERSION


def built_in(name: str):
    """Returns a built-in source as data.sources.source.Source."""
    return getattr(importlib.import_module(f"data.sources.{name}"), name)()
