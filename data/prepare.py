"""Prepares a dataset for training. Each process uses one core; under mpirun they share the work.

    uv run python -m data.prepare --source=DIR --output=D --validation_fraction=0.1     a folder of images per class
    uv run python -m data.prepare --source=labels.csv --output=D          a table with the columns file, label and split
    uv run mpirun -np 16 python -m data.prepare --source=DIR --output=D --verify        ImageNet's tar files, verified
    uv run python -m data.prepare --adopt --output=D        a dataset made elsewhere: writes indexes and dataset.json
    uv run python -m data.prepare --verify --output=D       checks a prepared dataset

To continue after an interruption, run the same command again.
"""
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common import command, flags, launcher
from common.activity import startup
from common.errors import ExitCode, UsageError, UserError, shown
from common.flags import flag
from data import formats
from data.preparing.team import Team, error_message
from data.sources import BUILT_IN


def parse_size(text: str) -> tuple[int, int] | None:
    """Parses 256x256 into (width, height), and none into None. Raises ValueError."""
    if text == "none":
        return None
    width, separator, height = text.partition("x")
    if not (separator and width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise ValueError(f"'{text}' is neither none nor a size such as 256x256")
    return int(width), int(height)


@dataclass(frozen=True)
class Options:
    """This command's flags."""

    source: str | None = flag(None, "Images to prepare: a folder of images, a table of files and labels (labels.csv), "
        "a folder with ImageNet's original tar files, a folder with MNIST's four files or those of a set like it, "
        "CIFAR-10's archive, or a built-in source (digits, fashion, fashion_holdout, cifar10, cifar10_holdout).",
        path=True)
    output: str | None = flag(None, "Folder of the dataset.", path=True, written=True)
    label_column: str | None = flag(None, "Column of a table that has the classes, such as species. Default: label or "
        "class.", parse=str.strip)
    format: str = flag("tfrecord", "Format to write: TFRecord with tf.train.Example, LMDB with Caffe's Datum, or "
        "MXNet's RecordIO.", formats.WRITTEN)
    validation_fraction: float = flag(0.0, "Fraction of each class for validation, if the source has no validation "
        "images. A hash of each file's path chooses them, as in train.py, and not --seed. 1: all, for a set of test "
        "images that train.py --mode=evaluate reads.", low=0.0, high=1.0)
    resize_shorter: int = flag(0, "Shrink larger images so that their shorter side has this many pixels. 0: do not "
        "resize.", low=0)
    resize: tuple[int, int] | None = flag("none", "Width and height to which all images are resized, such as 256x256, "
        "whatever their aspect ratio, as Caffe's script for ImageNet does. none: do not resize.", parse=parse_size)
    verify: bool = flag(False, "Decode every image. Without --source: check a prepared dataset.")
    strict: bool = flag(False, "Stop at the first image that cannot be used. Default: list it in rejected.jsonl and "
        "continue.")
    adopt: bool = flag(False, "Use the dataset in --output, which was made elsewhere. Write the missing indexes and "
        "dataset.json.")
    classes: str | None = flag(None, "File with the names of the classes, one per line, in label order. Only with "
        "--adopt.", path=True)
    shard_samples: int = flag(0, "Number of images per file. 0: 1024, or a single file per split for a built-in "
        "source.", low=0)
    seed: int = flag(0, "Random seed for the order of the images.", low=0)


def main(argv) -> int:
    """Runs a command line and returns the exit code."""
    with command.shell("data.prepare") as start:
        team = Team()
    if start.code:
        return start.code

    @command.program("data.prepare", __doc__, lambda _: flags.described(flags.define(Options)), team.barrier,
                     team.rank == 0)
    def prepare(argv) -> int:
        try:
            if team.size == 1:
                launcher.launched()  # raises UserError if MPI does not know the other processes
            options = flags.parsed(flags.read(flags.define(Options), argv), Options)
            _check(options)
            with startup.shown(team.rank):
                return _run(options, team)
        except UserError as error:
            error.on_all_ranks = True  # every rank raises it, or receives it from rank 0
            raise
        except Exception as error:  # the other ranks must not wait for this one
            team.abort(error_message(error))
            return ExitCode.WRONG

    return prepare(argv)


def _run(options: Options, team: Team) -> int:
    folder = Path(options.output)
    begun = time.monotonic()
    if options.adopt:
        from data.preparing.adopt import adopt

        return adopt(folder, Path(options.classes) if options.classes else None, team)
    if not options.source:
        from data.preparing.verify import verify

        return verify(folder, team)
    from data import facts
    from data.preparing import run

    preparation, terms = run.make_preparation(options, team)
    dataset, written = run.run(preparation, folder, team, terms)
    if team.rank == 0:
        team.log(run.summary(folder, dataset, written, time.monotonic() - begun))
        for line in facts.of_dataset(dataset, options.source in BUILT_IN):
            team.log(line)
    return 0


def _check(options: Options) -> None:
    """Raises UsageError for flags that do not go together."""
    wrong = None
    if not options.output:
        wrong = "--output is missing; give the folder of the dataset"
    elif shown(options.output) != options.output:
        wrong = f"--output={shown(options.output)} is not UTF-8, which DALI needs; choose another folder"
    elif options.adopt and options.source:
        wrong = "--adopt uses the dataset in --output; remove --source"
    elif not options.source and not options.adopt and not options.verify:
        wrong = "--source is missing; give the images to prepare, or --adopt or --verify for the dataset in --output"
    elif options.label_column is not None and not (options.source and Path(options.source).is_file()):
        wrong = "--label_column names a column of a table; give that as --source=TABLE"
    elif options.classes and not options.adopt:
        wrong = "--classes requires --adopt"
    elif options.source in BUILT_IN and (options.validation_fraction or options.resize_shorter or options.resize):
        wrong = f"--source={options.source} is built in; remove --validation_fraction, --resize_shorter and --resize"
    elif options.resize and options.resize_shorter:
        wrong = "--resize and --resize_shorter exclude each other"
    if wrong:
        raise UsageError(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
