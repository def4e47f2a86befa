"""Random data that never leaves the device, `synthetic:SIZE`. It shows a model's own speed, without any input."""
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common.errors import UsageError
from data import order
from data.dataset import Dataset, Split
from data.mixing import NOT_MIXED, Mixing
from data.staging.spool import Admitted

NAME = "synthetic"
CLASSES = 1000
VALIDATION_RATIO = 25  # training samples per validation sample, about ImageNet's ratio


def is_synthetic(data_dir: str) -> bool:
    """Whether a --data_dir names synthetic data."""
    return data_dir.startswith(f"{NAME}:")


def synthetic_dataset(data_dir: str) -> Dataset:
    """Returns a dataset of 1,000 classes with SIZE training and SIZE / 25 validation samples. Raises UsageError."""
    size = data_dir.removeprefix(f"{NAME}:")
    if not size.isdecimal() or not 0 < int(size) < 2**31:
        raise UsageError(f"--data_dir={data_dir}: synthetic data needs the number of training samples, such as "
                         "synthetic:1281167")
    train, validation = (Split(NAME, (), (samples,)) for samples in (int(size), -(-int(size) // VALIDATION_RATIO)))
    return Dataset(Path(data_dir), NAME, tuple(map(str, range(CLASSES))), train, validation, (127.5,) * 3, (73.6,) * 3)


class Resident:
    """Replaces data.feed.Batches: returns the same tensors again and again."""

    samples = ()

    def __init__(self, batch):
        self._batch = batch
        self.batch_size = batch[0].shape[0]
        self.iterator = self

    def __next__(self):
        return self._batch

    def admit(self, batches: int) -> Admitted:
        """Returns at once, because nothing is read."""
        return Admitted()


@dataclass(frozen=True)
class SyntheticFeed:
    """Replaces data.feed.Feed: returns the same batch each time."""

    dataset: Dataset
    image_size: int
    seed: int
    shard: int = 0
    shards: int = 1
    mixing: Mixing = NOT_MIXED
    _made: dict = field(default_factory=dict)  # by size and mixing; a compiled step has to see the same iterator again

    def prepare(self, ranges: Sequence[tuple[int, int]], batch_size: int, micro_batch_size: int, skip: int = 0,
                neighbours: int = 1, image_size: int | None = None) -> tuple:
        return micro_batch_size, image_size or self.image_size, self.mixing

    def open(self, prepared: tuple, again: bool = False) -> nullcontext:
        return nullcontext(self._batches(*prepared))

    def train(self, position: int, steps: int, *arguments, **options) -> nullcontext:
        return self.open(self.prepare([(position, steps)], *arguments, **options))

    def validation(self, batch_size: int) -> nullcontext:
        samples = self.dataset.validation.samples
        valid = len(order.validation_shard(samples, batch_size, self.shard, self.shards))
        return nullcontext((self._batches(batch_size, self.image_size, NOT_MIXED), valid))

    def _batches(self, *kind):
        if kind not in self._made:
            self._made[kind] = Resident(_random_batch(*kind, self.seed))
        return self._made[kind]


def _random_batch(batch_size, image_size, mixing, seed):
    import tensorflow as tf

    shape = (batch_size, image_size, image_size, 3)
    rows = [mixing.random_numbers(image_size, seed, np.arange(batch_size))] if mixing else []
    return (tf.cast(tf.random.stateless_uniform(shape, [seed, 0], 0, 256, tf.int32), tf.uint8),
            tf.random.stateless_uniform((batch_size, 1), [seed, 1], 0, CLASSES, tf.int64),
            *map(tf.constant, rows))
