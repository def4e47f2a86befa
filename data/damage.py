"""Finds the record on which DALI fails, for the one-line error message."""
import numpy as np

from common.errors import reason
from data.augmentation import AUGMENTATIONS
from data.dataset import Split
from data.formats import folder as class_folders
from data.pipeline import Transform, decoded


def input_reason(error, batches, read: int) -> str:
    """Returns the damaged record's name if DALI failed, else `reason`.

    batches: data.feed.Batches. read: number of samples read so far.
    """
    damage = batches.blame(read) if "dali" in str(error).lower() else None
    if damage and batches.split.format == "folder":
        commands = class_folders.conversion(batches.split.paths[0].parent, "--format=tfrecord", "--verify")
        return f"{damage}; to convert or leave out such files, {commands}"
    return f"{damage}; `data.prepare --verify` lists all damaged records" if damage else reason(error)


def first_damaged(split: Split, samples: np.ndarray) -> str | None:
    """Returns the name of the first of these samples that cannot be read or decoded, and which of the two, or None.

    Decodes one sample at a time. DALI's own reader is not asked, because it fails on a sample that comes later.
    """
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, exec_async=False, exec_pipelined=False)
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        pipeline.set_outputs(decoded(encoded, None, Transform(0, AUGMENTATIONS["none"])))
    pipeline.build()
    done = 0
    try:
        for image, _ in split.records(samples):
            if not image:
                return f"{split.name(samples[done])} is empty"
            pipeline.feed_input("encoded", [np.frombuffer(image, np.uint8)])
            pipeline.run()
            done += 1
    except OSError as error:
        return f"{split.name(samples[done])} cannot be read: {error.strerror or error}"
    except Exception:  # from DALI, LMDB or protocol buffers
        return f"{split.name(samples[done])} cannot be decoded"
    return None
