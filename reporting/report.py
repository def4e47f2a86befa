"""Draws the report of a run, or compares several: `uv run python -m reporting.report RUN [RUN ...]`.

With one run, the command writes RUN/report.html again, also while the run is in progress. With several, it writes one
page that compares them: peak and last accuracy next to the figures of the papers, the flags that differ, curves over
epochs and over time, the generalization gap, and trust ratios. It prints the path of the page.
"""
import sys
from dataclasses import dataclass
from pathlib import Path

from common import command, flags
from common.errors import UsageError, UserError
from common.files import write_atomically
from common.flags import flag
from reporting.compare import comparison
from reporting.run_data import RunData
from reporting.run_folder import PAGE
from reporting.run_page import report


@dataclass(frozen=True)
class Options:
    """This command's flags.

    output: File to write. Default: RUN/report.html for one run, report.html for several.
    target_top1: Validation top-1, such as 0.75. The comparison of several runs says after how many epochs and how long
        each run reached it.
    """

    output: str | None = None
    target_top1: float | None = flag(low=0.0, high=1.0)


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    if command.asks_for_help(argv):
        command.print_help(__doc__, *flags.described(flags.define(Options), flags.names(Options)))
        return 0
    with command.shell("reporting.report") as ending:
        values = flags.define(Options)
        values.set_gnu_getopt(True)  # flags may follow the folders
        folders = flags.read_with_arguments(values, argv)
        if not folders:
            raise UsageError("give the folder of a run, such as runs/20261122-104501-resnet20-4711")
        if values.target_top1 is not None and len(folders) == 1:
            raise UsageError("--target_top1 compares runs; give the folders of several")
        runs = [RunData.read(folder) for folder in folders]
        default = PAGE if len(runs) > 1 else runs[0].folder / PAGE
        path = Path(values.output or default).absolute()
        if not path.parent.is_dir():
            raise UserError(f"--output: the folder of {path} does not exist; create it first")
        write_atomically(path, comparison(runs, values.target_top1) if len(runs) > 1 else report(runs[0]))
        print(path, flush=True)
    return ending.code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
