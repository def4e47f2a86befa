"""Damaged images: left out of a folder before training, and errors in one line, with the record's name, during it."""
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import tensorflow as tf

from common.activity import activity, startup
from common.errors import UserError, complain, reason
from common.files import stand_in
from common.screen import Counter
from common.streams import silent
from data import damaged
from data.augmentation import AUGMENTATIONS
from data.dataset import Dataset, Split
from data.image_files import DAMAGED, left_out_line
from data.pipeline import decoder
from data.staging.spool import SpoolEnded
from distributed.lost import is_lost
from distributed.world import World
from plan.plan import divisors

NO_MEMORY = re.compile("ALLOC_FAILED|OUT_OF_MEMORY|[Oo]ut of memory|failed to allocate")  # of CUDA, cuDNN, cuBLAS
DECODING = "decoding each image once"
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
        with silent():  # DALI has printed a line before
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


def without_damaged(dataset: Dataset, world: World) -> Dataset:
    """Returns a folder of images without those that DALI cannot decode. Raises UserError and OSError on all ranks.

    All workers decode the images that are new or have changed. Rank 0 names those that are left out.
    """
    names = [*dataset.train.names(), *dataset.validation.names()]
    with startup.stage(DECODING):
        with world.raise_on_all_ranks():
            states = damaged.states(names) if world.rank == 0 else None
            new = None if states is None else np.flatnonzero(~np.isin(states, damaged.remembered()))
        new = world.broadcast(new, "new images")
        own = new[world.rank::world.size]
        counter = Counter(DECODING, len(own), "images", is_hidden=world.rank > 0)
        with world.raise_on_all_ranks(), counter, activity.during(DECODING, lambda: (counter.done, None)):
            fails = damaged.are_damaged([names[number] for number in own], world.cores, counter.add)
        found = np.sort(np.concatenate(world.gather(own[fails], "damaged images")))
    if world.rank == 0 and len(new):
        damaged.remember(states[np.setdiff1d(new, found)])
    first = dataset.train.samples  # number of the first validation image
    for name, samples in (("train", found[found < first]), ("validation", found[found >= first] - first)):
        if len(samples):
            split = getattr(dataset, name).without(samples, DAMAGED)
            dataset = replace(dataset, **{name: split})
            if world.rank == 0:
                [path], [listing] = split.paths, split.entries
                complain(*left_out_line(path, {DAMAGED: listing.left_out[DAMAGED]}))
    return dataset
