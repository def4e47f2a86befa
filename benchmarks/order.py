"""Measures what the global order of LMDB costs: the input pipeline with --order=global and with --order=file, in turn.

    uv run --group benchmark python -m benchmarks.order [--format=lmdb] [--photos=1000] [--rounds=5] [--seconds=4]

The photographs are those of benchmarks.photos. Both pipelines crop, resize to 224 pixels and flip, as in
benchmarks.input_pipeline, with batches of 64 on all cores, and read the dataset again and again. Prints the medians
over the rounds and the median ratio.
"""
import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import photos
from benchmarks.input_pipeline import prepare
from data.augmentation import AUGMENTATIONS
from data.dataset import ORDERS, open_dataset
from data.feed import Feed
from data.pipeline import DecoderSettings

BATCH, IMAGE_SIZE = 64, 224


def rate(batches, seconds: float) -> float:
    """Returns the images per second over some time, without what was prefetched before."""
    for _ in range(8):
        next(batches)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        next(batches)
        count += BATCH
    return count / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--format", default="lmdb", help="format of the dataset: lmdb or recordio")
    parser.add_argument("--photos", type=int, default=1000, help="number of photographs")
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each order")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as held:
        images = photos.make(Path(scratch) / "photos", options.photos)
        dataset = open_dataset(prepare(images, Path(scratch) / "set", f"--format={options.format}"))
        device, pipelines = DecoderSettings(threads=os.cpu_count()), {}
        for name in ORDERS:
            feed = Feed(dataset.in_order(name), IMAGE_SIZE, AUGMENTATIONS["crop_flip"], 0, device=device)
            prepared = feed.prepare([(0, dataset.train.samples // BATCH)], BATCH, BATCH)
            pipelines[name] = held.enter_context(feed.open(prepared, again=True))
        rates = {name: [] for name in ORDERS}
        for _ in range(options.rounds):
            for name, batches in pipelines.items():
                rates[name].append(rate(batches, options.seconds))
    ratios = [ours / theirs for ours, theirs in zip(*(rates[name] for name in ORDERS), strict=True)]
    print(json.dumps({name: round(statistics.median(own), 1) for name, own in rates.items()} | {
        "global / file": round(statistics.median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios]}))


if __name__ == "__main__":
    main()
