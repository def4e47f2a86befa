"""Finds the record on which DALI fails, for the one-line error message."""
import numpy as np

from common.errors import reason
from data.augmentation import AUGMENTATIONS
from data.dataset import Split
from data.formats import folder as class_folders
from data.pipeline import Transform, decoded
from data.spool import opened_reader


def input_reason(error, batches, read: int) -> str:
    """Returns the damaged record's name if DALI failed, else `reason`.

    batches: data.feed.Batches. read: number of samples read so far.
    """
    name = batches.blame(read) if "dali" in str(error).lower() else None
    if name and batches.split.format == "folder":
        commands = class_folders.conversion(batches.split.paths[0].parent, "--format=tfrecord", "--verify")
        return f"{name} cannot be decoded; to convert or leave out such files, {commands}"
    return f"{name} cannot be decoded; `data.prepare --verify` lists all damaged records" if name else reason(error)


def first_damaged(split: Split, samples: np.ndarray) -> str | None:
    """Returns the name of the first of these samples that DALI cannot read or decode, or None.

    Reads one sample at a time, to identify the one that fails.
    """
    from nvidia.dali import Pipeline

    done = 0
    with opened_reader(split, samples, len(samples)) as (read, _):
        pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, exec_async=False, exec_pipelined=False)
        with pipeline:
            encoded, _ = read()
            pipeline.set_outputs(decoded(encoded, None, Transform(0, AUGMENTATIONS["none"])))
        try:
            pipeline.build()
            for done in range(len(samples)):  # noqa: B007
                pipeline.run()
        except RuntimeError:
            return split.name(samples[done])
    return None
