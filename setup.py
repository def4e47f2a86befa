"""Ends `pip install .` at once, where Horovod and DALI's TensorFlow plugin would fail to compile minutes later.

Both compile against TensorFlow, which pip does not have where it builds them. uv has it (pyproject.toml).
"""
import importlib.util
import os
import sys
from pathlib import Path

from setuptools import setup

INSTEAD = """
bigbatch: pip cannot compile Horovod and DALI's TensorFlow plugin, because TensorFlow is not installed where it builds.
    everything, in the checkout: pip install --target .uv uv && .uv/bin/uv sync
    LARS alone (optim.lars):     pip install tensorflow==2.15.1 && pip install --no-deps .
"""


def installs_dependencies() -> bool:
    """Whether pip runs this file and will install what bigbatch requires."""
    if "PIP_BUILD_TRACKER" not in os.environ or "PIP_NO_DEPS" in os.environ:
        return False
    return b"--no-deps" not in Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")


if installs_dependencies() and importlib.util.find_spec("tensorflow") is None:
    sys.exit(INSTEAD)
setup()
