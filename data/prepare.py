"""Writes a source as a prepared dataset: `uv run python -m data.prepare --source=glyphs --output=DIR`."""
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from absl import flags as absl_flags

from data import tfrecord
from data.dataset import FORMATS, Dataset, DatasetError, Split, describe
from data.digits import digits
from data.glyphs import glyphs
from data.source import Source

SOURCES = {"digits": digits, "glyphs": glyphs}
VERSIONS = {name: sys.modules[source.__module__].VERSION for name, source in SOURCES.items()}


def prepare(source: Source, folder: Path) -> Dataset:
    """Writes the shards, their indexes and, last, dataset.json into a folder that exists."""
    splits = {}
    for name, samples in source.splits.items():
        path = folder / f"{name}-00000-of-00001.tfrecord"
        splits[name] = Split((path,), (tfrecord.write_shard(path, samples()),))
    dataset = Dataset(folder, "tfrecord", source.classes, **splits, mean=source.mean, std=source.std)
    scratch = folder / "dataset.json.part"
    scratch.write_text(json.dumps(describe(dataset), indent=1) + "\n")
    scratch.rename(folder / "dataset.json")
    return dataset


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
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_enum("source", None, list(SOURCES), "What to prepare.", flag_values=values, required=True)
    absl_flags.DEFINE_string("output", None, "The dataset's folder.", flag_values=values, required=True)
    absl_flags.DEFINE_enum("format", "tfrecord", FORMATS, "How it is written.", flag_values=values)
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__ + values.get_help())
        return 0
    try:
        rest = values(argv)
        if rest[1:]:
            raise absl_flags.Error(f"'{rest[1]}' is not a flag")
    except absl_flags.Error as error:
        print(f"data.prepare: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    folder = Path(values.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise DatasetError(f"--output: {folder} is not empty; choose another folder")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        dataset = prepare(SOURCES[values.source](), folder)
    except (OSError, DatasetError) as error:
        print(f"data.prepare: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {dataset.train.samples:,} training and {dataset.validation.samples:,} validation images of "
          f"{len(dataset.classes)} classes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
