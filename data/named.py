"""Resolves --data_dir: a prepared dataset, a folder of images per class, a built-in dataset or synthetic data."""
import os
import tempfile
from pathlib import Path

from common.errors import UserError, one_line
from common.files import cache_folder, ignore_unsupported
from common.flags import say_what_is_hidden
from data import class_folders, sources
from data.dataset import Dataset, open_dataset
from data.set_aside import FRACTION
from data.sources import BUILT_IN
from data.staging.remote import is_remote
from data.synthetic import is_synthetic, synthetic_dataset


def absolute(data_dir: str) -> str:
    """Returns a name that means the same dataset for a process in another folder."""
    is_absolute = data_dir in BUILT_IN or is_synthetic(data_dir) or is_remote(data_dir)
    return data_dir if is_absolute else str(Path(data_dir).absolute())


def open_named(data_dir: str, check_files: bool = True, fraction: float = FRACTION) -> Dataset:
    """Opens the dataset that --data_dir names. Raises UserError.

    check_files: whether the files that dataset.json lists have to be there. fraction: as for open_dataset.
    """
    if is_synthetic(data_dir):
        return synthetic_dataset(data_dir)
    if data_dir in BUILT_IN and check_files:  # on rank 0
        say_what_is_hidden("data_dir", data_dir)
    return open_dataset(built_in(data_dir) if data_dir in BUILT_IN else absolute(data_dir), check_files, fraction)


def count_train_samples(data_dir: str, most: int, fraction: float) -> int:
    """Returns the number of training samples. It counts no more than `most` images in a folder of them, or few more.

    Where a fraction of the images is set aside for validation, the number is an estimate. Raises UserError.
    """
    train = open_named(data_dir, check_files=False, fraction=fraction).train
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
