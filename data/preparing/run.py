"""A preparation from plan to dataset.json: what is there from an earlier run is kept, the rest is shared out."""
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

from data.dataset import Dataset, DatasetError, Split, describe
from data.preparing.images import Rules
from data.preparing.shards import SCRATCH, Plan, Written, finished, replace_text, shards, write_shard
from data.preparing.team import Team, claims, progress
from data.sources.items import Listed

SMALLEST_STD = 1.0  # images of one colour have none, and are divided by it


def make_plan(values, built_in: dict, versions: dict, team: Team) -> tuple[Plan, dict]:
    """The plan that the flags ask for, and the terms by which a later run knows that it is the same."""
    if values.source in built_in:
        source = built_in[values.source]()
        name, listing = f"{values.source} {versions[values.source]}", ""
    else:
        source = _listed(values, team)
        for line in source.warnings:
            team.say(line)
        name = str(Path(values.source).absolute())
        listing = hashlib.sha256(repr(source.classes).encode(errors="surrogateescape")
                                 + b"".join(items.digest() for items in source.splits.values())).hexdigest()
    rules = Rules(values.resize_shorter, values.verify)
    plan = Plan(source, values.format, source.counts, values.shard_samples, values.seed, rules, values.strict)
    terms = {flag: getattr(values, flag) for flag in (
        "format", "validation_fraction", "resize_shorter", "verify", "shard_samples", "seed")}
    return plan, {"source": name} | terms | {"listing": listing}


def run(plan: Plan, folder: Path, team: Team, terms: dict) -> tuple[Dataset | None, list[Written]]:
    """Writes what is missing of a dataset, dataset.json last. Its results are on rank 0; the others get (None, [])."""
    with contextlib.ExitStack() as stack:
        everything = shards(plan)
        done = team.first(lambda: _begin(folder, plan, terms, everything, stack))
        todo = [shard for shard in everything if shard.name not in done]
        with progress(team, sum(shard.stop - shard.start for shard in todo)) as bar:
            results = team.work(todo, lambda shard: write_shard(plan, shard, folder, team.beat),
                                claims(folder / SCRATCH / "claims"), bar)
        written = done | dict(zip([shard.name for shard in todo], results, strict=False))
        dataset = team.first(lambda: _end(folder, plan, everything, written))
        return (dataset, list(written.values())) if team.rank == 0 else (None, [])


def summary(folder: Path, dataset: Dataset, written: list[Written], seconds: float) -> str:
    images, size = sum(part.samples for part in written), sum(part.bytes for part in written)
    rejected = sum(len(part.rejected) for part in written)
    files = len(dataset.train.paths) + len(dataset.validation.paths)
    return (f"{folder}: {dataset.train.samples:,} training and {dataset.validation.samples:,} validation images of "
            f"{len(dataset.classes)} classes in {files} files, {size / 1e6:,.1f} MB; {seconds:.1f} s, "
            f"{images / max(seconds, 1e-9):,.0f} images/s; {sum(part.converted for part in written):,} converted, "
            f"{sum(part.resized for part in written):,} resized, {rejected:,} rejected"
            + (" (rejected.jsonl)" if rejected else ""))


def _listed(values, team) -> Listed:
    from data.sources.image_folder import image_folder
    from data.sources.imagenet import imagenet, is_imagenet

    source = Path(values.source)
    if not team.first(source.is_dir):
        raise DatasetError(f"--source: there is no folder {source}")
    if Path(values.output).resolve().is_relative_to(source.resolve()):
        raise DatasetError(f"--output: {values.output} lies in --source, and would be taken for images the next time")
    if team.first(lambda: is_imagenet(source)):
        if values.validation_fraction:
            raise DatasetError("--validation_fraction: ImageNet's tars have images for validation already")
        return imagenet(source, team)
    return image_folder(source, values.validation_fraction, values.seed, team)


def _begin(folder, plan, terms, everything, stack) -> dict[str, Written]:
    """Makes or takes up a folder, on rank 0; returns what is finished. `stack` holds it against a second run."""
    scratch = folder / SCRATCH
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "dataset.json").exists():
        shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed at its last step
        raise DatasetError(f"--output: {folder} is not empty: it holds a prepared dataset; choose another folder")
    if not scratch.is_dir() and any(folder.iterdir()):
        raise DatasetError(f"--output: {folder} is not empty; choose another folder")
    scratch.mkdir(exist_ok=True)
    lock = os.open(scratch / "lock", os.O_CREAT | os.O_RDWR)
    stack.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DatasetError(f"--output: another run is preparing {folder}") from None
    _agree(scratch / "plan.json", terms, folder)
    for leftover in scratch.iterdir():  # of shards that were not finished, and who was at them
        if leftover.is_dir():
            shutil.rmtree(leftover)
    (scratch / "claims").mkdir()
    found = {shard.name: finished(folder, shard) for shard in everything}
    return {name: written for name, written in found.items() if written}


def _agree(path, terms, folder):
    """Notes the terms of a new preparation; raises DatasetError where they are not those of the one begun."""
    with contextlib.suppress(FileNotFoundError):
        begun = json.loads(path.read_text())
        for name in terms:
            if begun.get(name) != terms[name]:
                difference = ("the images in --source are no longer the same" if name == "listing" else
                              f"--{name} is {terms[name]}, it was begun with {begun.get(name)}")
                raise DatasetError(f"--output: {folder} holds an unfinished preparation of another kind: {difference}; "
                                   f"give the same flags to go on with it, or remove it")
        return
    replace_text(path, json.dumps(terms, indent=1) + "\n")


def _end(folder, plan, everything, written) -> Dataset:
    """Describes the finished shards, on rank 0. Raises DatasetError where no image of a split could be used."""
    splits, rejected = {}, []
    for split in plan.counts:
        names = [shard.name for shard in everything if shard.split == split]
        rejected += [row for name in names for row in written[name].rejected]
        kept = [name for name in names if written[name].samples]
        if not kept:
            raise DatasetError(f"none of the {plan.counts[split]} {split} images could be used; the first: "
                               f"{': '.join(rejected[-1])}")
        splits[split] = Split(plan.format, tuple(folder / name for name in kept),
                              tuple(written[name].samples for name in kept))
    mean, std = (plan.source.mean, plan.source.std) if not isinstance(plan.source, Listed) else moments(
        [sum(column) for column in zip(*(part.histogram for part in written.values() if part.histogram), strict=True)])
    dataset = Dataset(folder, plan.format, plan.source.classes, **splits, mean=mean, std=std)
    if rejected:
        replace_text(folder / "rejected.jsonl", "".join(
            json.dumps({"name": name, "reason": reason}) + "\n" for name, reason in rejected))
    replace_text(folder / "dataset.json", json.dumps(describe(dataset), indent=1) + "\n")
    shutil.rmtree(folder / SCRATCH)
    return dataset


def moments(histogram: list[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of red, green and blue from 256 counts each; in integers as far as can be."""
    mean, std = [], []
    for start in (0, 256, 512):
        part = histogram[start:start + 256]
        count = sum(part) or 1
        total, squares = (sum(value ** power * n for value, n in enumerate(part)) for power in (1, 2))
        mean.append(round(total / count, 3))
        std.append(max(round((squares * count - total * total) ** 0.5 / count, 3), SMALLEST_STD))
    return tuple(mean), tuple(std)
