"""Checks --output_dir before TensorFlow is imported, which takes seconds. Plain Python."""
import os
from pathlib import Path

from common.errors import UserError
from common.recipe_file import flags_in
from optim.schedules import same
from reporting.run_folder import CHECKPOINTS, FLAGS
from training.settings import Settings


def create(folder: Path) -> None:
    """Creates the folder of a run if it is missing. Raises UserError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be created: {error.strerror}; choose another one") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output_dir: {folder} is not writable; choose another folder")


def has_checkpoints(folder: Path) -> bool:
    return any((folder / CHECKPOINTS).glob("step-*"))


def changed_flag(folder: Path, settings: Settings) -> tuple[str, str, str] | None:
    """Returns (name, value in the run, value now) of a flag of the recipe that differs from the run in a folder."""
    if not (folder / FLAGS).is_file():
        return None
    before, now = flags_in((folder / FLAGS).read_text()), flags_in(settings.text)
    return next(((name, before[name], now[name]) for name in settings.identity
                 if name in before and name in now and not same(before[name], now[name])), None)


def check(settings: Settings) -> None:
    """Raises UserError if a training cannot write to its --output_dir or cannot continue the run in it.

    It creates nothing, because other errors may follow.
    """
    if not settings.run.output_dir:
        return
    folder = Path(settings.run.output_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--output_dir: {existing} is not a writable folder; choose another --output_dir")
    changed = changed_flag(folder, settings)
    if changed and settings.run.resume == "auto" and has_checkpoints(folder):
        name, before, now = changed
        raise UserError(f"{folder} has checkpoints of another training: {name} was {before} and is now {now}; choose "
                        "another --output_dir, or start over with --resume=never")
