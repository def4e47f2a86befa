"""Batches for Keras: a DALI pipeline over a slice of the stream, as a tf.data dataset without copies through Python."""
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data import augmentation, order
from data.damage import first_damaged
from data.dataset import Dataset, Split
from data.mixing import NOT_MIXED, Mixing
from data.pipeline import Device, build_pipeline, matrix_reader

CPU = Device()
READ_AHEAD = 16  # batches; more than DALI and TensorFlow hold between the reader and the model
UPLOADED = 2  # batches prefetched to the model's device


@dataclass(frozen=True)
class Batches:
    """Batches for the model.

    iterator: for a compiled step. next() returns images uint8 (batch, image_size, image_size, 3), RGB, labels int64
    (batch, 1), and, if images are mixed, rows of Mixing.random_numbers.
    """

    iterator: Any
    split: Split
    samples: np.ndarray
    batch_size: int

    def __next__(self):
        return next(self.iterator)

    def blame(self, read: int) -> str | None:
        """Returns the name of the record that DALI cannot read or decode, among those that follow the first `read`.

        DALI reads ahead by a few batches.
        """
        return first_damaged(self.split, self.samples[read:read + READ_AHEAD * self.batch_size])


@dataclass(frozen=True)
class Feed:
    """How this worker reads a dataset.

    image_size: of validation. mixing: of training images. shard, shards: index of this worker's shard, and the number
    of shards.
    """

    dataset: Dataset
    image_size: int
    augmentation: str
    seed: int
    shard: int = 0
    shards: int = 1
    device: Device = CPU
    mixing: Mixing = NOT_MIXED

    @contextmanager
    def train(self, position: int, steps: int, batch_size: int, micro_batch_size: int, skip: int = 0,
              neighbours: int = 1, image_size: int | None = None) -> Iterator[Batches]:
        """Opens this shard's micro-batches of the next `steps` global batches from a position of the stream.

        skip: number of global batches to skip at the start because they were read before a resume.
        neighbours: number of shards whose micro-batches are adjacent in the global batch, if the format supports it.
        image_size: size of these images. Default: that of validation.
        """
        split, recipe = self.dataset.train, augmentation.AUGMENTATIONS[self.augmentation]
        image_size = image_size or self.image_size
        positions = order.worker_positions(split, steps, batch_size, self.shard, self.shards, neighbours,
                                           micro_batch_size)
        positions = positions[skip * batch_size // self.shards:]
        samples = order.stream(split, self.seed, position, steps * batch_size)[positions]
        numbers = None
        if recipe.random:
            numbers = augmentation.random_numbers(recipe, image_size, self.seed, position, positions)
        mixing = self.mixing.random_numbers(image_size, self.seed, position, positions) if self.mixing else None
        with self._batches(split, samples, micro_batch_size, image_size, numbers, mixing) as batches:
            yield batches

    @contextmanager
    def validation(self, batch_size: int) -> Iterator[tuple[Batches, int]]:
        """Opens this shard of the validation split: (batches, number of samples), in order, each sample once.

        The last batch is padded with other samples, which the caller has to mask.
        """
        split = self.dataset.validation
        samples = order.contiguous_shard(split.samples, self.shard, self.shards)
        if not len(samples):
            yield iter(()), 0
            return
        with self._batches(split, samples, batch_size, self.image_size) as batches:
            yield batches, len(samples)

    @contextmanager
    def _batches(self, split: Split, samples, batch_size, image_size, numbers=None, mixing=None):
        import nvidia.dali.plugin.tf as dali_tf
        import tensorflow as tf

        with ExitStack() as held:
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="bigbatch-index-"))
            read = split.kind.reader(order.file_slices(split, samples), Path(folder))
            read_numbers, read_mixing = (None if rows is None else matrix_reader(rows, Path(folder), name)
                                         for name, rows in (("numbers", numbers), ("mixing", mixing)))
            pipeline = build_pipeline(
                read, read_numbers, read_mixing, batch_size=batch_size, image_size=image_size,
                recipe=augmentation.AUGMENTATIONS[self.augmentation], first_label=self.dataset.first_label,
                device=self.device)
            outputs = {(batch_size, image_size, image_size, 3): tf.uint8, (batch_size, 1): tf.int64}
            if mixing is not None:
                outputs[batch_size, mixing.shape[1]] = tf.float32
            with tf.device(f"/{self.device.name}:0"):
                batches = dali_tf.DALIDataset(
                    pipeline, batch_size=batch_size, output_shapes=tuple(outputs),
                    output_dtypes=tuple(outputs.values()), device_id=self.device.number,
                    num_threads=self.device.threads)
                if self.device.upload:
                    batches = batches.apply(tf.data.experimental.prefetch_to_device(self.device.upload, UPLOADED))
                iterator = iter(batches)
            if not self.device.upload:  # DALI has read the indexes; deleted now, in case the process is killed
                held.close()
            yield Batches(iterator, split, samples, batch_size)
