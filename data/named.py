"""Resolves --data_dir: a prepared dataset, a folder of images per class, a table, a built-in or synthetic dataset."""
import itertools
import os
import shlex
import tempfile
from pathlib import Path

import numpy as np

from common.errors import UserError, one_line
from common.files import cache_folder, ignore_unsupported
from common.flags import say_what_is_hidden
from common.launcher import launched
from common.open_mpi import ended_together
from data import class_folders, sources, table
from data.class_folders import TABLES, Listing
from data.class_names import normal
from data.dataset import IMAGENET_MEAN, IMAGENET_STD, Dataset, Split, check_images, open_dataset
from data.set_aside import FRACTION, NOTHING, SetAside, set_aside
from data.sources import BUILT_IN
from data.staging.remote import is_remote
from data.synthetic import is_synthetic, synthetic_dataset


def absolute(data_dir: str) -> str:
    """Returns a name that means the same dataset for a process in another folder."""
    is_absolute = data_dir in BUILT_IN or is_synthetic(data_dir) or is_remote(data_dir)
    return data_dir if is_absolute else str(Path(data_dir).absolute())


def is_table(data_dir: str) -> bool:
    """Whether --data_dir names a table of files and labels."""
    is_named_so = data_dir.lower().removesuffix(".gz").endswith(TABLES)
    return is_named_so and data_dir not in BUILT_IN and os.path.isfile(data_dir)


def open_named(data_dir: str, check_files: bool = True, fraction: float = FRACTION,
               label_column: str | None = None) -> Dataset:
    """Opens the dataset that --data_dir names. Raises UserError.

    check_files: whether the files that dataset.json lists have to be there; those of a table have to. fraction: as for
    open_dataset. label_column: of a table, as in `data.table.read`.
    """
    if is_table(data_dir):
        return open_table(Path(data_dir).absolute(), SetAside(fraction), label_column)
    if is_synthetic(data_dir):
        return synthetic_dataset(data_dir)
    if data_dir in BUILT_IN and check_files:  # on rank 0
        say_what_is_hidden("data_dir", data_dir)
    return open_dataset(built_in(data_dir) if data_dir in BUILT_IN else absolute(data_dir), check_files, fraction)


def open_on_each_rank(data_dir: str, fraction: float, label_column: str | None) -> Dataset:
    """Opens the dataset before MPI starts, with its indexes on rank 0, which alone checks the files. Raises UserError.

    Arguments as for open_named. An error that all ranks find ends them here; one of rank 0's alone, together with them.
    """
    is_first = launched().rank == 0
    try:
        return open_named(data_dir, is_first, fraction, label_column)
    except (UserError, OSError):
        if is_first:
            open_named(data_dir, check_files=False, fraction=fraction, label_column=label_column)  # as the others do
            with ended_together():
                raise
        raise


def open_table(path: Path, fraction: SetAside, label_column: str | None) -> Dataset:
    """Opens a table of files and labels, whose images are read in place. Arguments as for open_named."""
    try:
        rows, notes, _ = table.read(path, fraction, label_column)
    except UserError as error:
        raise UserError(str(error).replace("--source:", "--data_dir:", 1)) from None
    known = {name: label for label, name in enumerate(dict.fromkeys(normal(row.label) for row in rows["train"]))}
    parts = [([row.file for row in part], np.array([known[normal(row.label)] for row in part], np.int64))
             for part in rows.values()]
    fraction = fraction if len(parts) == 1 else NOTHING
    if not fraction.is_nothing:  # by the paths as the table has them, as data.prepare does
        [(files, labels)] = parts
        chosen = set_aside(files, labels, fraction)
        parts = [([*itertools.compress(files, which)], labels[which]) for which in (~chosen, chosen)]
    flags = (f"--label_column={shlex.quote(label_column)}",) if label_column else ()
    flags += (f"--validation_fraction={fraction:g}",) if fraction.is_part else ()
    listings = [Listing.of_table(path, [os.path.relpath(path.parent / file, path.parent) for file in files], labels,
                                 flags) for files, labels in parts]
    if not len(listings[1]):
        raise UserError(f"--data_dir: {path} has no class with two images, of which one could be for validation")
    splits = [Split("folder", (path.parent,), (len(listing),), (listing,), fraction=fraction) for listing in listings]
    for split in splits:
        check_images(split)
    return Dataset(path.parent, "folder", tuple(known), *splits, mean=IMAGENET_MEAN, std=IMAGENET_STD, notes=(*notes,))


def count_train_samples(data_dir: str, most: int, fraction: float, label_column: str | None = None) -> int:
    """Returns the number of training samples. It counts no more than `most` images in a folder of them, or few more.

    Where a fraction of the images is set aside for validation, the number is an estimate. Raises UserError.
    """
    train = open_named(data_dir, check_files=False, fraction=fraction, label_column=label_column).train
    return train.samples or sum(int((1 - train.fraction) * class_folders.count(path, most)) for path in train.paths)


def built_in(name: str) -> Path:
    """Returns the folder of a built-in dataset, which is created in the cache if it does not exist.

    Several workers may call this at once. Each writes its own folder and renames it into place. The first one wins, and
    the others delete theirs.
    """
    try:
        cache = cache_folder()
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        raise UserError(f"the built-in dataset needs a folder: {one_line(error).rstrip('.')}; set XDG_CACHE_HOME "
                        "to one that can be written") from None
    folder = cache / f"{name}-{sources.version(name)}"
    if not folder.is_dir():
        from data.preparing.run import write_built_in

        try:
            with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=cache, ignore_cleanup_errors=True) as made:
                write_built_in(name, Path(made))
                try:
                    os.chmod(made, 0o755)
                except OSError as error:
                    ignore_unsupported("chmod", folder, error, "other users may not read it")
                os.rename(made, folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder
