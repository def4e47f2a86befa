"""Measures what smaller blocks of --shuffle_block cost: files opened, and the time of reading an image.

    uv run python -m benchmarks.shuffle

The dataset has ImageNet's 1,281,167 records in 1,024 TFRecord shards of tiny images, so that reading takes most of the
time. One worker of eight reads SAMPLES of them with each size of block, in turn, on one DALI thread. The first column
is the fraction of the images after which the next is in another file. The others are the medians over all rounds.
"""
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.intervals import write_shards
from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from data.pipeline import DecoderSettings

BLOCKS, SAMPLES, ROUNDS, BATCH = (1024, 64, 16, 4, 1), 40_960, 5, 64


def times(dataset, block: int) -> tuple[float, float, float]:
    """Returns (files opened per image, seconds to open the pipeline, microseconds per image)."""
    feed = Feed(dataset, 8, AUGMENTATIONS["none"], 0, 0, 8, DecoderSettings(threads=1), shuffle_block=block)
    began = time.perf_counter()
    with feed.train(0, SAMPLES // BATCH, 8 * BATCH, BATCH) as batches:
        next(batches)
        opened = time.perf_counter() - began
        slices = len(dataset.train.slices(batches.samples))
        began = time.perf_counter()
        for _ in range(SAMPLES // BATCH - 1):
            next(batches)
        return slices / SAMPLES, opened, (time.perf_counter() - began) / SAMPLES * 1e6


def main():
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder))
        dataset = open_dataset(folder)
        measured = {block: [] for block in BLOCKS}
        for _ in range(ROUNDS):
            for block in BLOCKS:
                measured[block].append(times(dataset, block))
        for block, rows in measured.items():
            files, opened, each = map(statistics.median, zip(*rows, strict=True))
            print(f"blocks of {block}: {files:.3f} files per image, {opened:.2f} s to open, {each:.0f} us per image")


if __name__ == "__main__":
    main()
