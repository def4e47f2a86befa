"""Draws the report of a run, or compares several: `uv run python -m reporting.report RUN [RUN ...]`.

With one run, the command writes RUN/report.html again, also while the run is in progress. With several, it writes one
page that shows them side by side. It prints the path of the page.
"""
import sys
from dataclasses import dataclass
from pathlib import Path

from common import command, flags
from common.errors import UsageError, UserError
from common.files import write_atomically
from reporting.compare import comparison
from reporting.run_data import RunData
from reporting.run_page import report


@dataclass(frozen=True)
class Options:
    """This command's flags.

    output: File to write. Default: RUN/report.html for one run, report.html for several.
    """

    output: str | None = None


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
        runs = [RunData.read(folder) for folder in folders]
        default = "report.html" if len(runs) > 1 else runs[0].folder / "report.html"
        path = Path(values.output or default).absolute()
        if not path.parent.is_dir():
            raise UserError(f"--output: the folder of {path} does not exist; create it first")
        write_atomically(path, comparison(runs) if len(runs) > 1 else report(runs[0]))
        print(path, flush=True)
    return ending.code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
