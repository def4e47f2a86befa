"""Shards, the unit of work. Each is written to a scratch folder with its index and checksums, then renamed into place.

A shard is a function of the preparation alone. It does not matter which rank writes it, or when.
"""
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from common.errors import UserError, one_line
from common.files import flush, full_disk_named, write_json
from data import checksums, formats
from data.images import Rejected, Rules, Stored, added, store
from data.sources.source import Items, Listed, Source

SCRATCH = ".preparing"
SHARD_SAMPLES = 1024  # about 110 MB per shard of ImageNet
MEASURED = 256  # training images used for mean and standard deviation


@dataclass(frozen=True)
class Preparation:
    """Everything that the written bytes depend on."""

    source: Source | Listed
    format: str  # one of data.formats.WRITTEN
    shard_samples: int  # number of samples in each shard, or 0
    seed: int
    rules: Rules
    strict: bool = False  # whether the first image that cannot be used ends the preparation


@dataclass(frozen=True)
class Shard:
    """Samples start to stop of a split, in the order in which they are written."""

    split: str
    name: str
    start: int
    stop: int


@dataclass
class Written:
    """The result of writing a shard.

    histogram: of the measured images' pixels, 256 counts each of red, green and blue, or empty.
    """

    samples: int = 0
    bytes: int = 0
    converted: int = 0
    resized: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)


def shards(preparation: Preparation) -> list[Shard]:
    suffix = formats.get(preparation.format).SUFFIX
    shards = []
    for split, count in preparation.source.counts.items():
        size = preparation.shard_samples or (SHARD_SAMPLES if isinstance(preparation.source, Listed) else count)
        total = -(-count // max(1, size))
        shards += [Shard(split, f"{split}-{number:05d}-of-{total:05d}{suffix}", number * size,
                         min((number + 1) * size, count)) for number in range(total)]
    return shards


def finished(folder: Path, shard: Shard) -> Written | None:
    """Returns the result of a shard that an earlier run finished, or None."""
    try:
        written = Written(**json.loads(_result_path(folder, shard).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return written if not written.samples or (folder / shard.name).exists() else None


def write_shard(preparation: Preparation, shard: Shard, folder: Path, beat: Callable[[int], None]) -> Written:
    """Writes one shard. Calls `beat(1)` after each sample, which may raise.

    The result is put in place before the data, so that a shard whose data is in place is finished.
    """
    written = Written()
    lines = []
    scratch = Path(tempfile.mkdtemp(prefix=f"{shard.name}.", dir=folder / SCRATCH))
    try:
        path = scratch / shard.name
        pairs = images_and_labels(preparation, shard, written, beat)
        with full_disk_named(folder):
            formats.get(preparation.format).write(path, _recorded(pairs, written, lines))
            if written.samples:
                _finish(path, preparation.format, written.samples, lines)
        if written.samples:
            for part in (checksums.path_of(path), formats.get(preparation.format).index_path(path)):
                if part:
                    part.replace(folder / part.name)
        write_json(_result_path(folder, shard), vars(written))  # not durable: without it, the shard is written again
        if written.samples:
            _move(path, folder / shard.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return written


def images_and_labels(preparation: Preparation, shard: Shard, written: Written, beat) -> Iterator[tuple]:
    """Yields the (encoded image, label) pairs of a shard, or (encoded image, label, name) if they come from files.

    Records in `written` what was done to them.
    """
    source = preparation.source.splits[shard.split]
    if not isinstance(source, Items):
        for sample in islice(source(), shard.start, shard.stop):
            yield sample
            beat(1)
        return
    order = shuffled(preparation, shard.split)
    measured = max(1, preparation.source.counts["train"] // MEASURED) if shard.split == "train" else 0
    for position in range(shard.start, shard.stop):
        number = int(order[position])
        measure = measured and position % measured == 0 and position // measured < MEASURED
        try:
            stored = _stored(source, number, preparation.rules, measure)
        except Rejected as error:
            if preparation.strict:
                raise UserError(f"{source.names[number]}: {error} (--strict)") from None
            written.rejected.append((source.names[number], str(error)))
        else:
            _count(stored, written)
            yield stored.encoded, int(source.labels[number]), source.names[number]
        beat(1)


def shuffled(preparation: Preparation, split: str) -> np.ndarray:
    """Returns the order in which a split's items are written, a function of the seed."""
    seeds = np.random.SeedSequence([preparation.seed, list(preparation.source.counts).index(split)])
    random = np.random.Generator(np.random.Philox(seeds))
    return random.permutation(preparation.source.counts[split])


def _stored(items, number, rules, measure) -> Stored:
    try:
        encoded = items.read(number)
    except OSError as error:
        raise Rejected(f"cannot be read: {error.strerror or one_line(error)}") from None
    return store(encoded, rules, measure)


def _count(stored, written):
    written.converted += stored.converted
    written.resized += stored.resized
    written.histogram = added(written.histogram, stored.histogram)


def _recorded(samples, written, lines):
    for sample in samples:
        written.samples += 1
        written.bytes += len(sample[0])
        lines.append(checksums.line(*sample))
        yield sample


def _finish(path, format_, count, lines):
    """Checks that all samples were written (a full disk may show late), and flushes the files to disk."""
    if (read := len(formats.get(format_).read_index(path))) != count:
        raise UserError(f"{path.name}: only {read} of {count} samples were written; check the free disk space")
    checksums.path_of(path).write_text("".join(lines))
    for file in (path / "data.mdb" if path.is_dir() else path, checksums.path_of(path)):
        flush(file)


def _move(path, target):
    try:
        path.rename(target)
    except OSError:
        if not target.is_dir():  # written by a run that seemed dead; it holds the same bytes
            raise


def _result_path(folder, shard) -> Path:
    return folder / SCRATCH / f"{shard.name}.json"
