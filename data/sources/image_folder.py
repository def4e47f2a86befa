"""Source: one folder of images per class, either DIR/train/CLASS and DIR/val/CLASS, or DIR/CLASS to be split."""
from pathlib import Path

import numpy as np

from common.errors import UserError
from data.balance import check_classes
from data.formats import folder as class_folders
from data.preparing.team import Team
from data.sources.source import Listed, files


def image_folder(source: Path, fraction: float, seed: int, team: Team) -> Listed:
    """Lists the images.

    fraction: fraction of each class for validation, if the source has no validation folder. Raises UserError.
    """
    classes, splits, listings, lines = team.on_rank_0(lambda: _read(source, fraction))
    listed = {}
    for split, listing in listings.items():
        prefix = str(splits[split] / "_")[len(str(source / "_")) - 1:-1]  # such as train/
        listed[split] = files(str(source), [prefix + name for name in listing.files], listing.labels)
    if "validation" not in listed:
        listed = _divided(listed["train"], fraction, seed)
    for split, items in listed.items():
        if not len(items):
            where = splits.get(split)
            raise UserError(f"--source: {class_folders.NO_IMAGES.format(where)}" if where else
                            f"--validation_fraction={fraction:g} selects no image from {source}; give a larger "
                            "fraction")
    for line in lines:
        team.log(line)
    return Listed(classes, listed)


def _read(source, fraction) -> tuple:
    """Returns the classes, the folder of each split that the source has, its listing, and what to tell the user."""
    splits, classes = _layout(source, fraction)
    check_classes(source, class_folders.learnable(splits["train"]))
    listings = {split: class_folders.Listing(top, classes) for split, top in splits.items()}
    return classes, splits, listings, class_folders.remarks(source, listings.values())


def _layout(source, fraction) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Returns the folder of each split that the source has, and the classes."""
    train, validation, _ = class_folders.layout(source)
    for name in ("val", "validation"):
        if train == source and (source / name).is_dir():
            raise UserError(f"--source: {source} contains {name}/ but no train/")
    if validation and fraction:
        raise UserError(f"--validation_fraction: {source} already has validation images in {validation.name}/; "
                        f"remove this flag, or prepare {train} alone")
    classes = class_folders.class_names(train)
    if not classes:
        raise UserError(f"--source: {train} contains no class folders")
    if not validation:
        if not fraction:
            if whole := class_folders.whole(source.absolute()):
                raise UserError(f"--source: {source} is one of the two splits in {whole}; give --source={whole}, or "
                                "--validation_fraction=0.1 to divide this one")
            raise UserError(f"--source: {source} has no val/ or validation/; give the fraction of each class to use "
                            f"for validation, such as --validation_fraction={class_folders.suggested_fraction(train)}")
        return {"train": train}, tuple(classes)
    if unknown := sorted(set(class_folders.class_names(validation)) - set(classes)):
        raise UserError(f"--source: class {unknown[0]!r} has a folder in {validation.name}/ but not in {train.name}/")
    return {"train": train, "validation": validation}, tuple(classes)


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
