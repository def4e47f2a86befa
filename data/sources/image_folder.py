"""Source: one folder of images per class, either DIR/train/CLASS and DIR/val/CLASS, or DIR/CLASS to be split."""
from pathlib import Path

import numpy as np

from common.errors import UserError
from data.dataset import validation_folder
from data.formats import folder as class_folders
from data.sources.items import Listed, files
from data.team import Team


def image_folder(source: Path, fraction: float, seed: int, team: Team) -> Listed:
    """Lists the images. The ranks split the classes' folders among them.

    fraction: fraction of each class for validation, if the source has no validation folder. Raises UserError.
    """
    splits, classes = team.on_rank_0(lambda: _layout(source, fraction))
    folders = [(top / name, label) for top in splits.values() for label, name in enumerate(classes)]
    found = team.map(folders, lambda entry: _names(source, *entry))
    listed, per_split = {}, len(classes)
    for number, split in enumerate(splits):
        rows = [row for part in found[number * per_split:(number + 1) * per_split] for row in part]
        listed[split] = files(str(source), [name for name, _ in rows], [label for _, label in rows])
    if "validation" not in listed:
        listed = _divided(listed["train"], fraction, seed)
    for split, items in listed.items():
        if not len(items):
            where = splits.get(split)
            raise UserError(f"--source: {where} contains no images in class folders" if where else
                            f"--validation_fraction={fraction:g} selects no image from {source}; give a larger "
                            "fraction")
    return Listed(classes, listed)


def _layout(source, fraction) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Returns the folder of each split that the source has, and the classes."""
    validation = validation_folder(source)
    train = source / "train" if (source / "train").is_dir() else source
    if validation and train == source:
        raise UserError(f"--source: {source} contains {validation.name}/ but no train/")
    if validation and fraction:
        raise UserError(f"--validation_fraction: {source} already has validation images in {validation.name}/; "
                        "remove this flag")
    classes = class_folders.class_names(train)
    if not classes:
        raise UserError(f"--source: {train} contains no class folders")
    if not validation:
        if not fraction:
            raise UserError(f"--source: {source} has no val/ or validation/; give the fraction of each class to use "
                            f"for validation, such as --validation_fraction={class_folders.suggested_fraction(train)}")
        return {"train": train}, tuple(classes)
    if unknown := sorted(set(class_folders.class_names(validation)) - set(classes)):
        raise UserError(f"--source: class {unknown[0]!r} has a folder in {validation.name}/ but not in train/")
    return {"train": train, "validation": validation}, tuple(classes)


def _names(source, folder, label) -> list[tuple[str, int]]:
    if not folder.is_dir():  # validation lacks this class
        return []
    start = len(str(source / "_")) - 1  # where the path within the source starts
    return [(str(path)[start:], label) for path in class_folders.image_files(folder)]


def _divided(items, fraction, seed) -> dict:
    """Splits off the same fraction of each class for validation, chosen by the seed.

    Training keeps at least one image of each class.
    """
    chosen = np.zeros(len(items), bool)
    for label in np.unique(items.labels):
        members = np.flatnonzero(items.labels == label)
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int(label)])))
        count = min(int(len(members) * fraction + 0.5), len(members) - 1)
        chosen[random.permutation(members)[:count]] = True
    return {"train": items.chosen(np.flatnonzero(~chosen)), "validation": items.chosen(np.flatnonzero(chosen))}
