"""Checks --output_dir before TensorFlow is imported, which takes seconds. Plain Python."""
import os
from pathlib import Path

from common.errors import UserError, complain
from common.flags import file_text
from plan.recipes import flags_in
from plan.run_folder import CHECKPOINTS, FLAGS, has_checkpoints
from plan.settings import Settings
from plan.values import same

PERSISTENT = "persistent_batch_norm"


def create(folder: Path) -> None:
    """Creates the folder of a run if it is missing. Raises UserError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be created: {error.strerror}; choose another one") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output_dir: {folder} is not writable; choose another folder")


def changed_flag(folder: Path, settings: Settings) -> tuple[str, str, str] | None:
    """Returns (name, value in the run, value now) of a flag of the recipe that differs from the run in a folder."""
    if not (folder / FLAGS).is_file():
        return None
    before, now = flags_in(file_text(folder / FLAGS)), flags_in(settings.text)
    return next(((name, before[name], now[name]) for name in settings.identity
                 if name in before and name in now and not same(before[name], now[name])), None)


def resumes(settings: Settings) -> bool:
    """Whether a training continues from the checkpoints in its --output_dir."""
    run = settings.run
    return bool(run.output_dir) and run.resume == "auto" and has_checkpoints(Path(run.output_dir))


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
    if not resumes(settings):
        return
    if changed := changed_flag(folder, settings):
        name, before, now = changed
        instead = (f"continue from its weights with another --output_dir and --init_checkpoint={folder}/{CHECKPOINTS}"
                   if name == "epochs" else "choose another --output_dir")
        raise UserError(f"{folder} has checkpoints of another training: {name} was {before} and is now {now}; "
                        f"{instead}, or start over with --resume=never")
    if settings.recipe.precision != "float32" and (folder / FLAGS).is_file():
        was = flags_in(file_text(folder / FLAGS)).get(PERSISTENT, "false")  # runs from before the flag lack it
        now = str(settings.launch.persistent_batch_norm).lower()
        if was != now:
            complain(f"--{PERSISTENT} was {was} and is now {now}: on GPUs, results will differ from an unstopped run's")
