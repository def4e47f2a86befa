"""Prints the number of workers to start: `python -m launch.workers --workers=N [train.py's flags]`.

That is N without --workers_schedule. With it, it is the number that the run in --output_dir asked for when it ended its
last phase, or the first of the schedule. With --next, it prints only the former, or nothing.
"""
import sys
from pathlib import Path

from common import command
from common.errors import UsageError, UserError
from plan import flags
from plan.run_folder import RUN, RunFolder
from plan.settings import Settings


def next_workers(settings: Settings) -> int | None:
    """Returns the number of workers that a run needs for its next phase, or None if it did not end at one."""
    if not (settings.launch.workers_schedule and settings.run.output_dir):
        return None
    return RunFolder(Path(settings.run.output_dir), reader="launch").read(RUN).get("next_workers")


def workers_now(settings: Settings, available: int) -> int:
    """Returns the number of workers to start. Raises UserError if so many are not available."""
    schedule = settings.launch.workers_schedule
    if not schedule:
        return available
    if not settings.run.output_dir:
        raise UserError("--workers_schedule needs an --output_dir, where the next phase continues")
    if (most := max(schedule.values)) > available:
        raise UserError(f"--workers_schedule={schedule} needs {most} workers, but {available} are available")
    return next_workers(settings) or schedule.values[0]


def parse(argv) -> tuple[int, Settings]:
    """Parses `--workers=N [train.py's flags]`. Raises UsageError."""
    words = [word for word in argv[1:] if word.startswith("--workers=")]
    if not words or not words[0].partition("=")[2].isdecimal():
        raise UsageError("--workers=N is missing")
    settings = flags.parse(["train.py", *(word for word in argv[1:] if word not in words)])
    return int(words[0].partition("=")[2]), settings


@command.program("launch.workers", __doc__)
def main(argv) -> None:
    """Runs a command line."""
    if "--next" in argv:
        settings = flags.parse(["train.py", *(word for word in argv[1:] if word != "--next")])
        print(next_workers(settings) or "", end="")
    else:
        workers, settings = parse(argv)
        print(workers_now(settings, workers))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
