"""Prepares a dataset for training, on one core a process: alone, or under mpirun on as many as there are.

    uv run python -m data.prepare --source=DIR --output=D --validation_fraction=0.1     images, a folder a class
    uv run mpirun -np 16 python -m data.prepare --source=DIR --output=D --verify        ImageNet's tars, checked
    uv run python -m data.prepare --adopt --output=D        a dataset made elsewhere: indexes and dataset.json
    uv run python -m data.prepare --verify --output=D       checks a prepared dataset

A run that was stopped goes on where it stopped when the same command is given again.
"""
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from absl import flags as absl_flags

from data import formats
from data.dataset import Dataset, DatasetError
from data.preparing.team import Team, one_line
from data.sources.digits import digits
from data.sources.glyphs import glyphs
from data.sources.source import Source

SOURCES = {"digits": digits, "glyphs": glyphs}
VERSIONS = {name: sys.modules[source.__module__].VERSION for name, source in SOURCES.items()}


def prepare(source: Source, folder: Path) -> Dataset:
    """Writes a built-in source into a folder that exists and is empty, in this process alone."""
    from data.preparing import run, shards

    plan = shards.Plan(source, "tfrecord", source.counts, 0, 0, shards.Rules())
    return run.run(plan, folder, Team(alone=True), {})[0]


def built_in(name: str) -> Path:
    """The folder of a built-in dataset, made in the cache if it is not there; safe when several workers do it at once.

    Each worker writes a folder of its own and renames it into place; the first wins, the others drop theirs.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bigbatch"
    folder = cache / f"{name}-{VERSIONS[name]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=cache))
        try:
            prepare(SOURCES[name](), scratch)
            scratch.chmod(0o755)
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def locate(data_dir: str) -> Path:
    """The folder that --data_dir means: a built-in dataset's, or the path itself."""
    return built_in(data_dir) if data_dir in SOURCES else Path(data_dir).absolute()


def main(argv) -> int:
    """Runs a command line; returns the exit code: 0 done, 2 a flag is wrong, 1 anything else is."""
    values = _flags()
    if {"--help", "-help", "-h", "--helpfull"} & set(argv[1:]):
        if Team().rank == 0:
            print(__doc__ + values.get_help())
        return 0
    try:
        rest = values(argv)
        if rest[1:]:
            raise absl_flags.Error(f"'{rest[1]}' is not a flag")
        _check(values)
    except absl_flags.Error as error:
        team = Team()
        team.say(" ".join(str(error).split()))
        team.leave()
        return 2
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    team = Team()
    try:
        return _run(values, team)
    except KeyboardInterrupt:
        team.say("interrupted; the same command goes on from here")
        return 130
    except DatasetError as error:  # raised on every rank
        team.say(one_line(error))
        team.leave()
        return 1
    except Exception as error:  # the others must not wait for this one
        team.abort(one_line(error))
        return 1


def _run(values, team) -> int:
    folder, begun = Path(values.output), time.monotonic()
    if values.adopt:
        from data.preparing.adopt import adopt

        return adopt(folder, Path(values.classes) if values.classes else None, team)
    if not values.source:
        from data.preparing.verify import verify

        return verify(folder, team)
    from data.preparing import run

    plan, terms = run.make_plan(values, SOURCES, VERSIONS, team)
    dataset, written = run.run(plan, folder, team, terms)
    if team.rank == 0:
        team.say(run.summary(folder, dataset, written, time.monotonic() - begun))
    return 0


def _flags():
    values = absl_flags.FlagValues()

    def define(kind, name, *rest, **options):
        getattr(absl_flags, f"DEFINE_{kind}")(name, *rest, flag_values=values, **options)

    define("string", "source", None, "What to prepare: a folder of images, a folder with ImageNet's original tars, or "
           f"built in: {', '.join(SOURCES)}.")
    define("string", "output", None, "The dataset's folder.", required=True)
    define("enum", "format", "tfrecord", formats.WRITTEN,
           "How it is written: " + "; ".join(f"{name}: {formats.FORMATS[name]}" for name in formats.WRITTEN) + ".")
    define("float", "validation_fraction", 0.0, "How much of each class is kept for validation, where the source has "
           "none of its own.", lower_bound=0.0, upper_bound=1.0)
    define("integer", "resize_shorter", 0, "Images whose shorter side is longer than this are made that small; 0: "
           "none is.", lower_bound=0)
    define("boolean", "verify", False, "Decode every image. Without --source: check a prepared dataset.")
    define("boolean", "strict", False, "Stop at the first image that cannot be used, rather than list it in "
           "rejected.jsonl.")
    define("boolean", "adopt", False, "--output is a dataset made elsewhere: write what is missing of indexes and "
           "dataset.json.")
    define("string", "classes", None, "With --adopt: a file with the classes' names, one a line, in label order.")
    define("integer", "shard_samples", 0, "Images a file; 0: 1024, or all of a built-in source's split.",
           lower_bound=0)
    define("integer", "seed", 0, "Of the order of the images, and of the choice for validation.", lower_bound=0)
    return values


def _check(values):
    """Raises absl_flags.Error for flags that do not go together."""
    wrong = None
    if values.adopt and values.source:
        wrong = "--adopt takes the dataset in --output as it is, and no --source"
    elif not values.source and not values.adopt and not values.verify:
        wrong = "flag --source=None: say what to prepare; or --adopt, or --verify, what is in --output"
    elif values.classes and not values.adopt:
        wrong = "--classes goes with --adopt"
    elif values.source in SOURCES and (values.validation_fraction or values.resize_shorter):
        wrong = f"--source={values.source} is made as it is: no --validation_fraction, no --resize_shorter"
    elif values.validation_fraction >= 1:
        wrong = "flag --validation_fraction=1: something has to be left to train on"
    if wrong:
        raise absl_flags.Error(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
