"""Batches for Keras: DALI's pipeline over a piece of the stream, as a tf.data dataset, with no copy through Python."""
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import order
from data.dataset import Dataset
from data.pipeline import build_pipeline


@dataclass(frozen=True)
class Feed:
    """How this worker reads a dataset.

    shard, shards: which part of how many. device: "cpu" or "gpu". device_id: the GPU's number, None on a CPU.
    """

    dataset: Dataset
    image_size: int
    augmentation: str
    seed: int
    shard: int = 0
    shards: int = 1
    device: str = "cpu"
    device_id: int | None = None
    threads: int = 2

    @contextmanager
    def train(self, position: int, steps: int, batch_size: int, micro_batch_size: int) -> Iterator:
        """An iterator over this shard's micro-batches of `steps` global batches, from a position of the stream on.

        Yields images float32 (micro_batch_size, image_size, image_size, 3), labels int64 (micro_batch_size, 1).
        """
        split = self.dataset.train
        samples = order.worker_stream(split, self.seed, position, steps, batch_size, self.shard, self.shards)
        with self._batches(split, samples, micro_batch_size, training=True, seed=_mix(self.seed, position, self.shard)
                           ) as batches:
            yield batches

    @contextmanager
    def validation(self, batch_size: int) -> Iterator:
        """(iterator, number of samples) over this shard of the validation split, in order, each sample once.

        The last batch is filled up with repeats of the last sample: what lies past the number is to be masked.
        """
        samples = order.contiguous_shard(self.dataset.validation.samples, self.shard, self.shards)
        if not len(samples):
            yield iter(()), 0
            return
        padded = np.pad(samples, (0, -len(samples) % batch_size), mode="edge")
        with self._batches(self.dataset.validation, padded, batch_size, training=False, seed=self.seed) as batches:
            yield batches, len(samples)

    @contextmanager
    def _batches(self, split, samples, batch_size, training, seed):
        import nvidia.dali.plugin.tf as dali_tf
        import tensorflow as tf

        with tempfile.TemporaryDirectory(prefix="bigbatch-index-") as folder:
            paths, indexes = order.write_indexes(split, samples, Path(folder))
            pipeline = build_pipeline(
                paths, indexes, batch_size=batch_size, image_size=self.image_size, augmentation=self.augmentation,
                training=training, mean=self.dataset.mean, std=self.dataset.std, device=self.device,
                device_id=self.device_id, threads=self.threads, seed=seed)
            shape = (batch_size, self.image_size, self.image_size, 3)
            with tf.device(f"/{self.device}:0"):
                batches = dali_tf.DALIDataset(
                    pipeline, batch_size=batch_size, output_shapes=(shape, (batch_size, 1)),
                    output_dtypes=(tf.float32, tf.int64), device_id=self.device_id, num_threads=self.threads)
                iterator = iter(batches)
        yield iterator  # DALI has read the indexes: nothing is left behind even by a process that is killed


def _mix(*numbers: int) -> int:
    """One 31-bit seed out of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)
