"""Chooses how the workers of a node read a dataset: in place, from a copy, or from a window of fetched blocks."""
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.activity import startup
from common.errors import UserError
from common.files import in_memory
from data.dataset import Dataset, Window
from data.staging import local_copy
from data.staging.remote import is_remote
from data.staging.spool import AHEAD
from data.staging.window import name_of, window_folder

DIRECT = 10**9  # bytes of the window on each node without --stage_gb


@dataclass(frozen=True)
class Staging:
    """The flags that say how the data comes to a node."""

    folder: str | None  # --stage_dir: on the node's disk, for the copy or the window; None: neither is kept
    gigabytes: float | None  # --stage_gb: maximum size of the window; None: the folder gets a copy of the whole dataset
    order: str  # --order: one of data.dataset.ORDERS
    block: int  # --shuffle_block: number of consecutive samples that one request fetches
    group: int  # --shuffle_group: number of blocks whose samples are shuffled together
    seed: int  # of the order of the blocks
    repeats: int = 1  # --repeats: how often an epoch takes each of its samples


def stage_dataset(dataset: Dataset, staging: Staging, workers: int, on_rank_0: Callable) -> Dataset:
    """Returns the dataset's copy on this node, the dataset read from a window, or the dataset as it is.

    All workers have to call it at the same time. Raises UserError and OSError, perhaps on this worker only.

    workers: number of workers on this node, which share the copy or the window.
    on_rank_0: calls a function on rank 0 alone, and returns its result on all ranks.
    """
    if is_remote(dataset.folder) or staging.gigabytes:
        name = on_rank_0(lambda: name_of(dataset, staging.block))
        return open_window(dataset, staging, name, workers)
    if not staging.folder:
        return dataset
    files = on_rank_0(lambda: local_copy.files(dataset))
    with startup.stage("copying the data"):
        return local_copy.stage(dataset, Path(staging.folder), files)


def open_window(dataset: Dataset, staging: Staging, name: str, workers: int) -> Dataset:
    """Returns the dataset to be read from a window. name: of the window, the same on all workers. Raises UserError."""
    if staging.order == "global" and not staging.group:
        raise UserError("--shuffle_group: data that is fetched is read in blocks of consecutive samples, which are "
                        "shuffled in groups; give the number of blocks in a group, such as --shuffle_group=16")
    if not hasattr(dataset.train.kind, "example"):
        raise UserError(f"{dataset.folder}: records of the format {dataset.format} cannot be fetched one by one; "
                        "prepare it as tfrecord, or copy it with --stage_dir alone")
    size = int(staging.gigabytes * 1e9) if staging.gigabytes else DIRECT
    room = min(AHEAD, size // (8 * workers))
    folder = window_folder(Path(staging.folder or in_memory(size) or tempfile.gettempdir()), name, bool(staging.folder))
    return dataset.in_window(Window(folder, size - 4 * workers * room, room, staging.block, staging.seed,
                                    is_shared=workers > 1, is_kept=bool(staging.folder), group=staging.group or 1,
                                    repeats=staging.repeats))
