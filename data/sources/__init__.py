"""Sources of datasets: one module per source."""
import importlib

BUILT_IN = ("digits", "fashion", "fashion_holdout", "cifar10", "cifar10_holdout")


def version(name: str) -> int:
    """Returns the version of a built-in source. It changes whenever the source's bytes change."""
    return _module(name).VERSION


def built_in(name: str):
    """Returns a built-in source as data.sources.source.Source."""
    return getattr(_module(name), name)()


def _module(name):
    return importlib.import_module(f"data.sources.{name.partition('_')[0]}")
