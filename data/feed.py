"""Batches for training and validation: a DALI pipeline over a slice of the stream of samples, as a tf.data dataset.

The images go from DALI to TensorFlow without passing through Python.
"""
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from common.files import scratch_folder
from common.streams import close_cout
from data import order
from data.augmentation import ALTERNATING, Augmentation, mirrored_in_turn, random_numbers
from data.dataset import Dataset, Split
from data.mixing import NOT_MIXED, Mixing
from data.pipeline import DecoderSettings, Readers, Transform, build_pipeline, matrix_reader
from data.staging.spool import Admitted, Spool, opened_reader

CPU = DecoderSettings()
PART = 65_536  # number of samples whose random numbers are generated at a time, which limits the memory
UPLOADED = 2  # batches prefetched to the model's device


@dataclass(frozen=True)
class Batches:
    """An open pipeline. Each batch is images, uint8 (batch, image_size, image_size, 3), RGB; labels, int64 (batch, 1);
    and, if images are mixed, rows of Mixing.random_numbers. The model itself converts the images to float32 and
    normalizes them (model_zoo.create_model).

    Call `admit` before the iterator is asked for batches. next() of this object does both for one batch.
    """

    iterator: Any  # of tf.data; a compiled function takes it as an argument and calls next()
    split: Split
    samples: np.ndarray  # numbers of the samples in the order in which they are returned, int64
    batch_size: int
    spool: Spool | None = None  # the copy that DALI reads; None: DALI reads the dataset itself

    def __next__(self):
        self.admit(1)
        return next(self.iterator)

    def admit(self, batches: int) -> Admitted:
        """Waits until the next batches can be read. Raises SpoolEnded if they cannot.

        The caller has finished with the batches that it had asked for before the previous call.
        """
        return self.spool.admit(batches * self.batch_size) if self.spool else Admitted()


class Prepared(NamedTuple):
    """The samples that a pipeline will read, and their random numbers."""

    split: Split
    samples: np.ndarray  # their numbers in reading order, int64 (samples,)
    batch_size: int
    image_size: int
    numbers: np.ndarray | None = None  # rows of augmentation.random_numbers; None: nothing is random
    mixing: np.ndarray | None = None  # rows of Mixing.random_numbers; None: images are not mixed
    epochs: np.ndarray | None = None  # the epoch of each sample; None: epoch 0


@dataclass(frozen=True)
class Feed:
    """How this worker reads a dataset.

    Its shard is its part of each global batch, which can come from any file. In data.formats, a shard is a file.
    """

    dataset: Dataset
    image_size: int  # of validation images, in pixels
    augmentation: Augmentation  # of training images; also says which part of a validation image is seen
    seed: int
    shard: int = 0  # index of this worker's shard
    shards: int = 1
    device: DecoderSettings = CPU
    mixing: Mixing = NOT_MIXED  # mixup and CutMix of training images
    shuffle_block: int = order.BLOCK  # `block` of data.order.permutation
    shuffle_group: int = 0  # `group` of data.order.permutation
    repeats: int = 1  # `repeats` of data.order.stream

    def prepare(self, ranges: Sequence[tuple[int, int]], batch_size: int, micro_batch_size: int, skip: int = 0,
                neighbours: int = 1, image_size: int | None = None) -> Prepared:
        """Determines which training samples this shard reads: its micro-batches of the global batches.

        It uses only NumPy, so a thread can call it while another pipeline is read.

        ranges: (position in the stream, number of global batches), ..., to be read one after another. A format that is
            read file by file supports only one.
        skip: number of global batches to skip at the start because they were read before a resume.
        neighbours: number of shards whose micro-batches are adjacent in the global batch, if the format supports it.
        image_size: size of these images. Default: that of validation.
        """
        split = self.dataset.train
        image_size = image_size or self.image_size
        positions = np.concatenate([position + order.worker_positions(
            split, steps, batch_size, self.shard, self.shards, neighbours, micro_batch_size)
            for position, steps in ranges])
        # Each global batch has the same number of this shard's samples.
        positions = positions[skip * len(positions) // sum(steps for _, steps in ranges):]
        samples = order.stream(split, self.seed, positions, self.shuffle_block, self.shuffle_group, self.repeats)
        epochs = positions // split.samples
        numbers = mixing = None
        if self.augmentation.random:
            in_turn = [mirrored_in_turn(split.samples, self.seed, samples, epochs)] if (
                self.augmentation.flip == ALTERNATING) else []
            numbers = by_parts(partial(random_numbers, self.augmentation, image_size, self.seed), positions, *in_turn)
        if self.mixing:
            mixing = by_parts(partial(self.mixing.random_numbers, image_size, self.seed), positions)
        return Prepared(split, samples, micro_batch_size, image_size, numbers, mixing, epochs)

    def train(self, position: int, steps: int, *arguments, **options) -> AbstractContextManager[Batches]:
        """Opens this shard's micro-batches of the next `steps` global batches from a position of the stream.

        arguments, options: as for `prepare`.
        """
        return self.open(self.prepare([(position, steps)], *arguments, **options))

    @contextmanager
    def validation(self, batch_size: int) -> Iterator[tuple[Batches, int]]:
        """Opens this shard of the validation split: (batches, number of samples), in order, each sample once.

        The last batch is padded with other samples, which the caller has to mask. If the format supports any order, the
        batch after it is the first again.
        """
        split = self.dataset.validation
        samples = order.validation_shard(split.samples, batch_size, self.shard, self.shards)
        if not len(samples):
            yield iter(()), 0
            return
        read = np.resize(samples, -(-len(samples) // batch_size) * batch_size) if split.any_order else samples
        with self.open(Prepared(split, read, batch_size, self.image_size), again=True) as batches:
            yield batches, len(samples)

    @contextmanager
    def open(self, prepared: Prepared, again: bool = False) -> Iterator[Batches]:
        """Opens a pipeline over what was prepared.

        again: whether it will be read more than once. Formats read file by file go on with other samples instead.
        """
        import nvidia.dali.plugin.tf as dali_tf
        import tensorflow as tf

        close_cout()
        batch_size = prepared.batch_size
        with ExitStack() as held:
            pipeline, spool = held.enter_context(self.pipeline(prepared, again=again))
            # Shape -> dtype, in the order of the pipeline's outputs.
            outputs = {(batch_size, prepared.image_size, prepared.image_size, 3): tf.uint8, (batch_size, 1): tf.int64}
            if prepared.mixing is not None:
                outputs[batch_size, prepared.mixing.shape[1]] = tf.float32
            with tf.device(f"/{self.device.name}:0"):
                batches = dali_tf.DALIDataset(
                    pipeline, batch_size=batch_size, output_shapes=tuple(outputs),
                    output_dtypes=tuple(outputs.values()), device_id=self.device.number,
                    num_threads=self.device.threads)
                if self.device.upload:
                    batches = batches.apply(tf.data.experimental.prefetch_to_device(self.device.upload, UPLOADED))
                iterator = iter(batches)
            if not (self.device.upload or spool):
                held.close()  # deletes the scratch files, which DALI has opened: a killed process leaves none behind
            yield Batches(iterator, prepared.split, prepared.samples, batch_size, spool)

    @contextmanager
    def pipeline(self, prepared: Prepared, until: str = "augment", again: bool = False) -> Iterator[tuple]:
        """Context manager that yields the DALI pipeline of `open`, up to one of pipeline.STAGES, and its spool or None.

        At its end, it deletes the scratch files, which DALI opens when the pipeline is built.
        """
        opened = opened_reader(prepared.split, prepared.samples, prepared.batch_size, again, prepared.epochs,
                               self.device.mmap)
        with opened as (read, spool), scratch_folder() as folder:
            readers = Readers(read, *(None if rows is None else matrix_reader(rows, folder, name) for name, rows in (
                ("numbers", prepared.numbers), ("mixing", prepared.mixing))))
            transform = Transform(prepared.image_size, self.augmentation, self.device, self.dataset.mean)
            yield build_pipeline(readers, transform, prepared.batch_size, self.dataset.first_label, until), spool


class OpenPipeline:
    """A pipeline that stays open between two reads if the second one continues the first: opening one takes seconds."""

    def __init__(self):
        self._held = ExitStack()
        self._batches, self._upcoming = None, iter(())

    def open_for(self, wanted: Iterable, opening: Callable[[], AbstractContextManager]) -> Any:
        """Returns a pipeline that reads the first of `wanted` next: the open one, or a new one.

        wanted: what is to be read, one after another, such as the numbers of the steps.
        opening: opens a pipeline that reads all of `wanted`. It is called if the open one reads something else next.
        """
        wanted = iter(wanted)
        if next(wanted) != next(self._upcoming, None):
            self.close()
            self._batches, self._upcoming = self._held.enter_context(opening()), wanted
        return self._batches

    def close(self) -> None:
        self._batches, self._upcoming = None, iter(())
        self._held.close()


def by_parts(function: Callable[..., np.ndarray], *columns: np.ndarray) -> np.ndarray:
    """Applies a function of columns to PART of their rows at a time, which saves memory. Concatenates the results."""
    return np.concatenate([function(*(column[start:start + PART] for column in columns))
                           for start in range(0, len(columns[0]), PART)])
