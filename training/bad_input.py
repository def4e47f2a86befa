"""Input errors during training, reported in one line, with the record's name if it is known."""
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from common.errors import UserError, reason
from common.files import stand_in
from common.streams import redirected
from data.augmentation import AUGMENTATIONS
from data.dataset import Split
from data.pipeline import decoder
from data.staging.spool import SpoolEnded
from distributed.lost import is_lost
from plan.plan import divisors

NO_MEMORY = re.compile("ALLOC_FAILED|OUT_OF_MEMORY|[Oo]ut of memory|failed to allocate")  # of CUDA, cuDNN, cuBLAS
READ_AHEAD = 16  # batches; more than DALI and TensorFlow hold between the reader and the model


@contextmanager
def bad_input_is_user_error(stopped: str, batches, read: int) -> Iterator[None]:
    """Raises UserError for data that cannot be read or does not fit in the device's memory.

    It does so on this rank alone. The others learn from Horovod that it has ended (distributed.lost).

    stopped: what the error stopped, which starts the message. read: number of samples of `batches` read before.
    """
    try:
        yield
    except SpoolEnded as error:
        raise SpoolEnded(f"{stopped}: {error}") from None
    except tf.errors.OpError as error:
        if is_lost(error):
            raise
        if isinstance(error, tf.errors.ResourceExhaustedError) or NO_MEMORY.search(str(error)):
            half = max((size for size in divisors(batches.batch_size) if 2 * size <= batches.batch_size), default=None)
            raise UserError(f"{stopped}: the device ran out of memory; use " + (
                f"--micro_batch_size={half} instead of {batches.batch_size}" if half else "smaller images")) from None
        if "deterministic XLA" in str(error):
            raise UserError(f"{stopped}: {reason(error)} Use --xla=auto, or remove --xla or --deterministic") from None
        raise UserError(f"{stopped}: {input_reason(error, batches, read)}") from None


def input_reason(error, batches, read: int) -> str:
    """Returns the damaged record's name and what to do if DALI failed on one, else `reason`.

    batches: data.feed.Batches. read: number of samples read so far. DALI reads ahead by a few batches, and starts again
    after the last sample.
    """
    damage = None
    if len(batches.samples) and "dali" in str(error).lower():
        first = read % len(batches.samples)
        with open(os.devnull, "w") as nothing, redirected(2, nothing.fileno()):  # DALI has printed a line before
            damage = first_damaged(batches.split, batches.samples[first:first + READ_AHEAD * batches.batch_size])
    if damage and batches.split.format == "folder":
        commands = batches.split.conversion("--format=tfrecord", "--verify")
        return f"{damage}; to convert or leave out such files, {commands}"
    return f"{damage}; `data.prepare --verify` lists all damaged records" if damage else reason(error)


def first_damaged(split: Split, samples: np.ndarray) -> str | None:
    """Returns the name of the first of these samples that cannot be read or decoded and what failed, or None.

    Decodes one sample at a time. DALI's own reader is not asked, because it fails on a sample that comes later.
    """
    pipeline = decoder(AUGMENTATIONS["none"])
    done = 0
    try:
        for image, _ in split.records(samples):
            if words := "empty" if not image else stand_in(image):
                return f"{split.name(samples[done])} is {words}"
            pipeline.feed_input("encoded", [np.frombuffer(image, np.uint8)])
            pipeline.run()
            done += 1
    except OSError as error:
        return f"{split.name(samples[done])} cannot be read: {error.strerror or error}"
    except Exception:  # from DALI, LMDB or protocol buffers
        return f"{split.name(samples[done])} cannot be decoded"
    return None
