"""The version of this code: its number, and the git revision of a checkout."""
import os
import subprocess
from pathlib import Path

from common import VERSION

ROOT = Path(__file__).parents[1]


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
