"""The processor of this machine, as Linux describes it."""
import platform
import re
from pathlib import Path

ABOUT = Path("/proc/cpuinfo")


def name(about: Path = ABOUT) -> str:
    """Returns the processor's name, or its architecture where Linux has no name for it."""
    found = re.search(r"^model name\s*: (.+)", _text(about), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def instructions(about: Path = ABOUT) -> set[str]:
    """Returns the names of the processor's instruction sets, such as avx2, among other words."""
    return {*_text(about).split()}


def _text(about: Path) -> str:
    return about.read_text() if about.exists() else ""
