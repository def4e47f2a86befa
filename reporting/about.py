"""run.json: what a run was made with: command, recipe, origin of each flag, dataset, hosts, versions, git revision."""
import contextlib
import platform
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path

from common import VERSION
from common.version import ROOT, git_revision
from plan import recipes
from training.observer import RunInfo

COMMENTS = ("title", "Row", "Reported", "Rehearsed", "Caveat", "Sources", "Left open", "Workers")  # of a recipe
PACKAGES = {"TensorFlow": "tensorflow", "Keras": "keras", "Horovod": "horovod", "DALI": "nvidia-dali-cuda120",
            "NumPy": "numpy"}


def about(run: RunInfo) -> dict:
    """Returns the content of run.json for a run that starts or resumes now."""
    data = run.dataset
    return {
        "command": shlex.join(sys.argv), "started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "hosts": run.hosts,
        "recipe": recipe(run.recipe), "origins": run.origins, "expected": run.expected and run.expected.points,
        "dataset": {"folder": str(data.folder), "format": data.format, "classes": len(data.classes),
                    "train_samples": data.train.samples, "validation_samples": data.validation.samples,
                    "validation_content": data.validation_content
                    } | ({"damaged": data.damaged} if data.damaged else {}),
        "versions": versions(), "git": git_revision(ROOT)}


def recipe(path: Path | None) -> dict | None:
    """Returns path and flags of a recipe, and what its comments say of the paper: table row and result, or None."""
    if not path:
        return None
    fields = recipes.read(path)
    comments = {name: fields.pop(name, None) for name in COMMENTS}
    return {"path": str(path), "row": comments["Row"], "reported": comments["Reported"], "flags": fields}


def versions() -> dict[str, str]:
    numbers = {"Python": platform.python_version(), "bigbatch": VERSION}
    for name, package in PACKAGES.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            numbers[name] = metadata.version(package)
    return numbers
