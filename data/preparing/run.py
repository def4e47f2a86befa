"""Runs a preparation from its flags to dataset.json. Keeps what an earlier run finished; the ranks split the rest."""
import contextlib
import functools
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

from common.activity import startup
from common.errors import UserError
from common.files import write_atomically, write_json
from common.flags import ADDRESS, say_what_is_hidden
from common.locks import LOCK, Taken, locked
from data import checksums, sources
from data.balance import check_classes
from data.dataset import IMAGENET_MEAN, IMAGENET_STD, Dataset, Split, describe
from data.images import Rules, added
from data.preparing.shards import SCRATCH, Preparation, Written, finished, shards, write_shard
from data.preparing.team import Team
from data.set_aside import SetAside
from data.sources.source import Listed, Source

SMALLEST_STD = 1.0  # images of one colour have a std of 0, and pixels are divided by it


def make_preparation(options, team: Team) -> tuple[Preparation, dict]:
    """Returns the preparation that the flags ask for, and its terms: what a later run must share to continue it."""
    if options.source in sources.BUILT_IN:
        if team.rank == 0:
            say_what_is_hidden("source", options.source)
        source = sources.built_in(options.source)
        name, listing = f"{options.source} {sources.version(options.source)}", ""
    else:
        source = _of_files(options, team)
        if not SetAside(options.validation_fraction).is_everything:
            check_classes(options.source, source.classes)
        name = str(Path(options.source).absolute())
        listing = hashlib.sha256(repr(source.classes).encode(errors="surrogateescape") + source.digest).hexdigest()
    rules = Rules(options.resize_shorter, options.verify, options.resize)
    preparation = Preparation(source, options.format, options.shard_samples, options.seed, rules, options.strict)
    terms = {flag: getattr(options, flag) for flag in (
        "format", "validation_fraction", "resize_shorter", "resize", "verify", "shard_samples", "seed")}
    return preparation, {"source": name} | terms | {"listing": listing}


def write_built_in(name: str, folder: Path) -> Dataset:
    """Writes a built-in source into an existing, empty folder, in this process alone."""
    load_writer("tfrecord")
    with startup.stage(f"making {name}"):
        source = sources.built_in(name)
        preparation = Preparation(source, "tfrecord", 0, 0, Rules())
        return run(preparation, folder, Team(single_process=True), {})[0]


def load_writer(format: str) -> None:
    """Loads what writes a format, as a stage of its own, because it may take longer than a small dataset."""
    if format == "tfrecord":
        with startup.stage("loading TensorFlow"):
            import tensorflow  # noqa: F401


def run(preparation: Preparation, folder: Path, team: Team, terms: dict) -> tuple[Dataset | None, list[Written]]:
    """Writes the missing parts of a dataset, dataset.json last. Rank 0 gets the results; the others get (None, [])."""
    with contextlib.ExitStack() as stack:
        everything = shards(preparation)
        done = team.on_rank_0(lambda: _begin(folder, preparation, terms, everything, stack))
        todo = [shard for shard in everything if shard.name not in done]
        if todo:
            load_writer(preparation.format)
        results = team.work(todo, lambda shard: write_shard(preparation, shard, folder, team.beat),
                            sum(shard.stop - shard.start for shard in todo),
                            lambda shard: _claim(folder / SCRATCH / "claims" / shard.name), "writing")
        written = done | dict(zip([shard.name for shard in todo], results, strict=False))
        dataset = team.on_rank_0(lambda: _end(folder, preparation, everything, written))
        return (dataset, list(written.values())) if team.rank == 0 else (None, [])


def summary(folder: Path, dataset: Dataset, written: list[Written], seconds: float) -> str:
    images = sum(part.samples for part in written)
    size = sum(part.bytes for part in written)
    rejected = sum(len(part.rejected) for part in written)
    files = len(dataset.train.paths) + len(dataset.validation.paths)
    return (f"{folder}: {dataset.train.samples:,} training and {dataset.validation.samples:,} validation images of "
            f"{len(dataset.classes)} classes in {files} files, {size / 1e6:,.1f} MB; {seconds:.1f} s, "
            f"{images / max(seconds, 1e-9):,.0f} images/s; {sum(part.converted for part in written):,} converted, "
            f"{sum(part.resized for part in written):,} resized, {rejected:,} rejected"
            + (" (rejected.jsonl)" if rejected else ""))


def _of_files(options, team) -> Source | Listed:
    from data.sources import cifar10
    from data.sources.idx import idx, is_idx
    from data.sources.image_folder import image_folder
    from data.sources.imagenet import imagenet, is_imagenet
    from data.sources.table import table

    source, fraction = Path(options.source), SetAside(options.validation_fraction)
    if ADDRESS.match(options.source):
        raise UserError(f"--source: {options.source} is an address; data.prepare reads files, so copy them to a disk "
                        "and give their folder")
    is_file = team.on_rank_0(source.is_file)
    if not is_file and not team.on_rank_0(source.is_dir):
        raise UserError(f"--source: there is no folder {source}")
    if team.on_rank_0(lambda: cifar10.is_cifar10(source)):
        _refuse_changes(source, "CIFAR-10, whose images", options)
        return cifar10.of_path(source)
    if is_file:
        return table(source, fraction, team, options.label_column)
    if Path(options.output).resolve().is_relative_to(source.resolve()):
        raise UserError(f"--output: {options.output} is inside --source, so a later run would read it as images; "
                        "choose another folder")
    if team.on_rank_0(lambda: is_imagenet(source)):
        if not fraction.is_nothing:
            raise UserError("--validation_fraction: ImageNet's tar files already contain validation images; remove "
                            "this flag")
        return imagenet(source, team)
    if team.on_rank_0(lambda: is_idx(source)):
        _refuse_changes(source, "IDX files, which", options)
        return idx(source)
    return image_folder(source, fraction, team)


def _refuse_changes(source, what, options) -> None:
    if options.validation_fraction or options.resize_shorter or options.resize:
        raise UserError(f"--source: {source} contains {what} are stored as they are; remove --validation_fraction, "
                        "--resize_shorter and --resize")


def _begin(folder, preparation, terms, everything, stack) -> dict[str, Written]:
    """Creates a folder or reopens an unfinished one, on rank 0, and returns the finished shards.

    `stack` holds the lock that keeps out a second run.
    """
    scratch = folder / SCRATCH
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "dataset.json").exists():
        shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was killed in its last step
        raise UserError(f"--output: {folder} already contains a prepared dataset; choose another folder")
    if not scratch.is_dir() and any(folder.iterdir()):
        raise UserError(f"--output: {folder} is not empty; choose another folder")
    scratch.mkdir(exist_ok=True)
    try:
        stack.enter_context(locked(scratch / LOCK))
    except Taken as holder:
        raise UserError(f"--output: another run ({holder}) is preparing {folder}; wait until it ends") from None
    _agree(scratch / "plan.json", terms, folder)
    for leftover in scratch.iterdir():  # unfinished shards and the claims to them
        if leftover.is_dir():
            shutil.rmtree(leftover)
    (scratch / "claims").mkdir()
    return {shard.name: written for shard in everything if (written := finished(folder, shard))}


def _claim(path) -> bool:
    """Creates a shard's file, on the rank that is first. This balances ranks of any speed, on any shared disk."""
    with contextlib.suppress(FileExistsError):
        path.touch(exist_ok=False)
        return True
    return False


def _agree(path, terms, folder):
    """Stores the terms of a new preparation. Raises UserError if an unfinished one has other terms."""
    with contextlib.suppress(FileNotFoundError):
        begun = json.loads(path.read_text())
        for name in terms:
            if begun.get(name) != terms[name]:
                difference = ("the images in --source have changed" if name == "listing" else
                              f"--{name} is now {terms[name]} but was {begun.get(name)}")
                raise UserError(f"--output: {folder} contains an unfinished preparation with other input: "
                                f"{difference}; give the same flags to continue it, or remove the folder")
        return
    write_json(path, terms, durable=True)


def _end(folder, preparation, everything, written) -> Dataset:
    """Describes the finished shards, on rank 0. Raises UserError if too few images could be used."""
    splits = {}
    rejected = []
    for split, count in preparation.source.counts.items():
        names = [shard.name for shard in everything if shard.split == split]
        rejected += [row for name in names for row in written[name].rejected]
        kept = [name for name in names if written[name].samples]
        if count and not kept:
            raise UserError(f"none of the {count} {split} images could be used; for example, "
                            f"{': '.join(rejected[-1])}")
        splits[split] = Split(preparation.format, tuple(folder / name for name in kept),
                              tuple(written[name].samples for name in kept))
    source = preparation.source
    if rejected and splits["train"].paths:
        left = np.concatenate([*map(checksums.labels, splits["train"].paths)])
        lost = np.setdiff1d(source.splits["train"].labels, left)
        check_classes(folder, [name for label, name in enumerate(source.classes) if label not in lost])
    mean, std = (source.mean, source.std) if not isinstance(source, Listed) else moments(
        functools.reduce(added, (part.histogram for part in written.values()), []))
    dataset = Dataset(folder, preparation.format, source.classes, **splits, mean=mean, std=std)
    if rejected:
        rows = (json.dumps({"name": name, "reason": reason}) + "\n" for name, reason in rejected)
        write_atomically(folder / "rejected.jsonl", "".join(rows), durable=True)
    write_json(folder / "dataset.json", describe(dataset), durable=True)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)  # NFS keeps the lock's file, which is open
    return dataset


def moments(histogram: list[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation of red, green and blue; without images, those of ImageNet.

    histogram: 256 counts each, or an empty list.
    """
    from PIL.ImageStat import Stat

    if not histogram:
        return IMAGENET_MEAN, IMAGENET_STD
    counted = Stat(histogram)
    return (tuple(round(mean, 3) for mean in counted.mean),
            tuple(max(round(deviation, 3), SMALLEST_STD) for deviation in counted.stddev))
