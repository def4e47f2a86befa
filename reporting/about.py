"""run.json: what a run was made with: command, recipe, origin of each flag, dataset, hosts, versions, git revision."""
import contextlib
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from common import VERSION
from plan import recipe_file
from training.observer import RunInfo

ROOT = Path(__file__).parents[1]
COMMENTS = ("title", "Row", "Reported", "Sources", "Left open", "Workers")  # of a recipe
PACKAGES = {"TensorFlow": "tensorflow", "Keras": "keras", "Horovod": "horovod", "DALI": "nvidia-dali-cuda120",
            "NumPy": "numpy"}


def about(run: RunInfo) -> dict:
    """Returns the content of run.json for a run that starts or resumes now."""
    data = run.dataset
    return {
        "command": shlex.join(sys.argv), "started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "hosts": run.hosts,
        "recipe": recipe(run.recipe), "origins": run.origins,
        "dataset": {"folder": str(data.folder), "format": data.format, "classes": len(data.classes),
                    "train_samples": data.train.samples, "validation_samples": data.validation.samples},
        "versions": versions(), "git": git_revision(ROOT)}


def recipe(path: Path | None) -> dict | None:
    """Returns path, flags, and what the paper reports (None unless a comment says it) of the recipe that was read."""
    if not path:
        return None
    fields = recipe_file.read(path)
    comments = {name: fields.pop(name, None) for name in COMMENTS}
    return {"path": str(path), "row": comments["Row"], "reported": comments["Reported"], "flags": fields}


def versions() -> dict[str, str]:
    numbers = {"Python": platform.python_version(), "bigbatch": VERSION}
    for name, package in PACKAGES.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            numbers[name] = metadata.version(package)
    return numbers


def version() -> str:
    """Returns Bigbatch's version, and the git revision if this is a checkout."""
    revision = revision_text(git_revision(ROOT))
    return f"{VERSION} (git {revision})" if revision else VERSION


def revision_text(git: dict | None) -> str | None:
    """Returns what git_revision has returned as a text, or None."""
    return f"{git['revision']}{', with uncommitted changes' if git.get('changed') else ''}" if git else None


def git_revision(folder: Path) -> dict | None:
    """Returns revision and changed (whether tracked files differ from it), or None if no checkout starts here."""
    def git(*words):
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=20, check=True,
                              stdin=subprocess.DEVNULL, env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"}).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != folder.resolve():
            return None  # an installed package in a folder of another project
        return {"revision": git("rev-parse", "HEAD"),
                "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None
