"""Checks and locks --output_dir: one training at a time writes to it, and only if it can continue the run there."""
import contextlib
import itertools
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from common import locks
from common.errors import UserError, complain, one_line
from common.flags import file_text
from common.run_folder import CHECKPOINTS, FLAGS, RunFolder, has_checkpoints, is_run
from plan.recipes import FINE_TUNING_RATE, SMALL, flags_in, read
from plan.settings import Settings
from plan.values import same

LEASE = 120  # seconds; NFS 4 servers free the locks of a lost host after 90, unless configured otherwise
POLL = 1.0  # seconds
RUNS = "runs"  # folder of the runs without --output_dir
FROM_SCRATCH = ("optimizer", "learning_rate", "lr_schedule")  # flags that tell a run of small_images.flags


def changed_flag(folder: Path, settings: Settings, names: Iterable[str] = ()) -> tuple[str, str, str] | None:
    """Returns (name, value in the run, value now) of the first flag that differs from the run in a folder, or None.

    names: flags to compare. Default: those of the recipe.
    """
    if not (folder / FLAGS).is_file():
        return None
    before, now = flags_in(file_text(folder / FLAGS)), flags_in(settings.text)
    return next(((name, before[name], now[name]) for name in names or settings.identity
                 if name in before and name in now and not same(before[name], now[name])), None)


def resumes(settings: Settings) -> bool:
    """Whether a training continues from the checkpoints in its --output_dir."""
    run = settings.run
    return bool(run.output_dir) and run.resume == "auto" and has_checkpoints(Path(run.output_dir))


def check(settings: Settings) -> None:
    """Raises UserError if a command cannot write to its --output_dir, or a training cannot continue the run there.

    Call it before TensorFlow is imported, which takes seconds. It creates nothing, because other errors may follow. It
    compares the flags in flags.txt; training.checkpoints later compares those in the checkpoint itself.
    """
    if not settings.run.output_dir and settings.run.mode != "train":
        return
    folder = Path(settings.run.output_dir or RUNS).absolute()
    _create(next(path for path in (folder, *folder.parents) if os.path.lexists(path)))
    if settings.run.mode in ("evaluate", "predict") and is_run(folder):
        raise UserError(f"--output_dir: {folder} is the folder of a run, whose results would be overwritten; choose "
                        f"another one, such as {folder}/evaluation")
    if not resumes(settings):
        return
    if changed := changed_flag(folder, settings):
        name, before, now = changed
        instead = "choose another --output_dir"
        if name == "epochs":
            more = float(now) - float(before)
            before, now = f"{float(before):g}", f"{float(now):g}"
            if not RunFolder(folder).ending():
                instead = f"--epochs={before} continues it; {instead}"
            elif more > 0:
                instead = from_weights(folder, f"--epochs={more:g}")
        raise UserError(f"{folder} has checkpoints of another training: {name} was {before} and is now {now}; "
                        f"{instead}, or start over with --resume=never")
    if settings.recipe.precision != "float32" and (
            changed := changed_flag(folder, settings, ["persistent_batch_norm"])):
        name, before, now = changed
        complain(f"--{name} was {before} and is now {now}: on GPUs, results will differ from an unstopped run's")


def from_weights(folder: Path, *flags: str) -> str:
    """Returns the advice to start a training from a run's weights, with its flags and these.

    The learning rate of small_images.flags, which is for random weights, becomes that for trained ones.
    """
    run, small = flags_in(file_text(folder / FLAGS)) if is_run(folder) else {}, read(SMALL)
    is_from_scratch = run.get("freeze") != "true" and all(run.get(name) == small[name] for name in FROM_SCRATCH)
    command = shlex.join(["uv", "run", "train.py", f"--flagfile={folder}/{FLAGS}", *flags,
                          *[FINE_TUNING_RATE] * is_from_scratch, f"--init_checkpoint={folder}/{CHECKPOINTS}",
                          f"--output_dir={folder}-longer"])
    return f"a training that starts from its weights is: {command}; run that"


@contextlib.contextmanager
def made(model: str) -> Iterator[Path]:
    """Context manager for a new folder of a run without --output_dir. At its end, a folder without files is removed.

    Two processes with the same number, as in containers, that start in the same second get two folders. Raises
    UserError. model: its name.
    """
    runs, name = Path(RUNS).absolute(), f"{datetime.now():%Y%m%d-%H%M%S}-{model}-{os.getpid()}"
    _create(runs)
    for number in itertools.count(1):
        folder = runs / (f"{name}-{number}" if number > 1 else name)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _create(folder: Path) -> None:
    """Creates the folder of a run if it is missing. Raises UserError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(f"--output_dir: {one_line(error)}") from None
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be created: {error.strerror}; choose another one") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output_dir: {folder} is not a writable folder; choose another --output_dir")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager that creates a run's folder if it is missing, and locks it.

    If another process holds the lock, and its host may be lost, this waits up to LEASE seconds: a network file system
    frees the lock of a lost host when the host's lease ends. The file of the lock names its holder. Raises UserError if
    the folder cannot be written, or if another training holds the lock, with its host and process.
    """
    _create(folder)
    with contextlib.ExitStack() as held:
        _wait(held, folder)
        yield


def _wait(held, folder) -> None:
    """Acquires the lock, which `held` releases. held: contextlib.ExitStack."""
    began = time.monotonic()
    announced = None
    while True:
        try:
            held.enter_context(locks.locked(folder / locks.LOCK))
            return
        except locks.Taken as taken:
            [holder] = taken.args
        is_known = isinstance(holder, locks.Holder)
        if (is_known and not holder.may_be_lost()) or time.monotonic() - began > LEASE:
            raise UserError(f"--output_dir: another training run ({holder}) writes to {folder}; choose another folder, "
                            "or wait until that run has ended")
        if is_known and holder != announced:
            announced = holder
            complain(f"another training run ({holder}) holds the lock on {folder}; waiting for up to {LEASE} s, after "
                     "which the lock of a lost host is free")
        time.sleep(POLL)
