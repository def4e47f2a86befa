"""A device that computes at a fixed speed and reads its images from a server: how long does it wait for them?

    python -m benchmarks.peers.far READER BUCKET BATCH RATE SECONDS IMAGES FRACTION

READER is one of READERS, BUCKET an s3:// or http:// address, RATE in images/s. It ends after SECONDS or IMAGES.
FRACTION of the set fits into bigbatch's window. Prints `first`, the seconds to the first batch, and, after 1,024
samples, `waited`, the fraction of the time in which the device waited, and `images`.
"""
import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.peers.tf_data import training_image
from data.augmentation import AUGMENTATIONS
from data.dataset import Dataset, Window, open_dataset
from data.feed import Feed
from data.formats import tfrecord
from data.pipeline import DecoderSettings
from data.staging.window import window_folder

IMAGE_SIZE, THREADS, SHUFFLED = 224, 2, 1024
SEED, BLOCK, GROUP = 0, 64, 16
PASSES = 3


@contextlib.contextmanager
def bigbatch(dataset: Dataset, batch_size: int, fraction: float) -> Iterator[Callable]:
    """Blocks of 64 samples through a window on the local disk, in groups of 16, as train.py reads them."""
    kept = fraction * sum(int(index[:, 1].sum()) for index in (*dataset.train.entries, *dataset.validation.entries))
    with tempfile.TemporaryDirectory() as place:
        window = Window(window_folder(Path(place), "benchmark"), int(kept), 64 << 20, BLOCK, SEED)
        feed = Feed(dataset.in_window(window), IMAGE_SIZE, AUGMENTATIONS["crop_flip"], SEED,
                    device=DecoderSettings(threads=THREADS), shuffle_block=BLOCK, shuffle_group=GROUP)
        with feed.train(0, PASSES * dataset.train.samples // batch_size, batch_size, batch_size) as batches:
            yield batches.__next__


@contextlib.contextmanager
def dali(dataset: Dataset, batch_size: int, _) -> Iterator[Callable]:
    """DALI's own reader of s3:// with its buffer of 1,024 samples. It needs the indexes on a disk."""
    from nvidia.dali import Pipeline, fn, types
    from nvidia.dali import tfrecord as features

    with tempfile.TemporaryDirectory() as place:
        indexes = []
        for number, path in enumerate(dataset.train.paths):
            indexes.append(f"{place}/{number}.idx")
            Path(indexes[-1]).write_bytes(tfrecord.index_path(path).read_bytes())
        pipeline = Pipeline(batch_size=batch_size, num_threads=THREADS, device_id=None, seed=SEED)
        with pipeline:
            read = fn.readers.tfrecord(
                path=[str(path) for path in dataset.train.paths], index_path=indexes, random_shuffle=True,
                initial_fill=SHUFFLED, features={
                    tfrecord.IMAGE: features.FixedLenFeature((), features.string, ""),
                    tfrecord.LABEL: features.FixedLenFeature([1], features.int64, 0)})
            images = fn.decoders.image_random_crop(read[tfrecord.IMAGE], output_type=types.RGB)
            images = fn.resize(images, size=(IMAGE_SIZE, IMAGE_SIZE), antialias=False)
            pipeline.set_outputs(fn.flip(images, horizontal=fn.random.coin_flip()), read[tfrecord.LABEL])
        pipeline.build()
        yield pipeline.run


@contextlib.contextmanager
def tf_data(dataset: Dataset, batch_size: int, _) -> Iterator[Callable]:
    """tf.data: whole shards, four at a time, downloaded by Python, and a buffer of 1,024 samples."""
    import tensorflow as tf

    def records(url):
        def download(url):
            with urllib.request.urlopen(url.decode()) as answer:
                content = answer.read()
            entries = index[url.decode()]
            return np.array([content[start + 12:start + size - 4] for start, size in entries.tolist()], object)

        records = tf.numpy_function(download, [url], tf.string)
        return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(records, [None]))

    urls = [str(path) for path in dataset.train.paths]
    index = dict(zip(urls, dataset.train.entries, strict=True))
    read = tf.data.Dataset.from_tensor_slices(urls).shuffle(len(urls)).repeat()
    read = read.interleave(records, cycle_length=4, num_parallel_calls=4, deterministic=False).shuffle(SHUFFLED)
    read = read.map(lambda record: training_image(record, IMAGE_SIZE), num_parallel_calls=THREADS)
    yield iter(read.batch(batch_size).prefetch(tf.data.AUTOTUNE)).__next__


READERS = {reader.__name__: reader for reader in (bigbatch, dali, tf_data)}


def main(reader: str, bucket: str, batch_size: int, rate: float, seconds: float, images: float,
         fraction: float) -> None:
    dataset, began = open_dataset(bucket), time.perf_counter()
    with READERS[reader](dataset, batch_size, fraction) as batch:
        batch()
        first = time.perf_counter() - began
        for _ in range(SHUFFLED // batch_size):  # until what was read before the first batch is used
            time.sleep(batch_size / rate)
            batch()
        waited, count, began = 0.0, 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds and count < images:
            batch()
            waited += time.perf_counter() - began - elapsed
            time.sleep(batch_size / rate)
            count += batch_size
        print(json.dumps({"first": first, "waited": waited / elapsed, "images": count}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *map(float, sys.argv[4:]))
