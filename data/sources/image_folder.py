"""Source: one folder of images per class, either DIR/train/CLASS and DIR/val/CLASS, or DIR/CLASS to be split."""
from pathlib import Path

import numpy as np

from common.errors import UserError
from data import class_folders
from data.balance import check_classes
from data.class_names import distinct
from data.facts import of_listings
from data.preparing.team import Team
from data.set_aside import FRACTION, SetAside, set_aside
from data.sources.source import Items, Listed, files


def image_folder(source: Path, fraction: SetAside, team: Team) -> Listed:
    """Lists the images.

    fraction: fraction of each class for validation, if the source has no validation folder. Raises UserError.
    """
    if fraction.is_everything:  # test images alone may lie in test/
        source = team.on_rank_0(lambda: class_folders.lone_validation(source)) or source
    classes, splits, listings, lines = team.on_rank_0(lambda: _read(source, fraction))
    listed = {}
    for split, listing in listings.items():
        prefix = str(splits[split] / "_")[len(str(source / "_")) - 1:-1]  # such as train/
        listed[split] = files(str(source), [prefix + name for name in listing.files], listing.labels)
        if not len(listed[split]):
            raise UserError(f"--source: {class_folders.NO_IMAGES.format(splits[split])}")
    if "validation" not in listed:
        listed = divided(listed["train"], listings["train"].files, fraction)
    for line in lines:
        team.log(line)
    return Listed(classes, listed)


def _read(source, fraction) -> tuple:
    """Returns the classes, the folder of each split that the source has, its listing, and what to tell the user."""
    splits, classes = _layout(source, fraction)
    if not fraction.is_everything:
        check_classes(source, class_folders.learnable(splits["train"]))
    listings = {split: class_folders.Listing(top, classes) for split, top in splits.items()}
    classes = class_folders.with_images(classes, [*listings.values()])
    return classes, splits, listings, of_listings(source, listings.values())


def _layout(source, fraction) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Returns the folder of each split that the source has, and the classes."""
    train, validation, _ = class_folders.layout(source)
    lone = next((source / name for name in ("val", "validation") if (source / name).is_dir()),
                class_folders.lone_validation(source))
    if train == source and lone:
        raise UserError(f"--source: {source} contains {lone.name}/ but no train/; --validation_fraction=1 prepares "
                        "test images alone, for --mode=evaluate")
    if validation and not fraction.is_nothing:
        raise UserError(f"--validation_fraction: {source} already has validation images in {validation.name}/; "
                        f"remove this flag, or prepare {train} alone")
    classes = distinct(class_folders.class_names(train), f"--source: {train}")
    if not classes:
        raise UserError(f"--source: {train} contains no class folders{class_folders.no_classes(train)}")
    if not validation:
        if fraction.is_nothing:
            if whole := class_folders.whole(source.absolute()):
                raise UserError(f"--source: {source} is one of the two splits in {whole}; give --source={whole}, or "
                                f"--validation_fraction={FRACTION:g} to divide this one")
            raise UserError(f"--source: {source} has no val/ or validation/; give the fraction of each class to use "
                            f"for validation, such as --validation_fraction={FRACTION:g}")
        return {"train": train}, classes
    if unknown := sorted({*distinct(class_folders.class_names(validation), f"--source: {validation}")} - {*classes}):
        raise UserError(f"--source: class {unknown[0]!r} has a folder in {validation.name}/ but not in {train.name}/")
    return {"train": train, "validation": validation}, classes


def divided(items: Items, paths: list[str], fraction: SetAside) -> dict[str, Items]:
    """Divides images into training and validation (data.set_aside). Raises UserError.

    paths: by which they are divided.
    """
    chosen = set_aside(paths, items.labels, fraction)
    if not chosen.any():
        raise UserError(f"--validation_fraction={fraction:g} selects no image from {items.container}, because no class "
                        "has two")
    return {"train": items.chosen(np.flatnonzero(~chosen)), "validation": items.chosen(np.flatnonzero(chosen))}
