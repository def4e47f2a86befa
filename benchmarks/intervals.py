"""Measures the gap between the intervals of a training: from the last batch of one to the first batch of the next.

    uv run python -m benchmarks.intervals

The dataset has ImageNet's 1,281,167 records in 1,024 TFRecord shards of tiny images. One worker of 1, of 8 and of 1,024
reads several epochs. The output compares one pipeline for several epochs, with the next one prepared ahead, with a
pipeline for each epoch, as a fraction of the time that an epoch takes at RATE.
"""
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from PIL import Image

from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from data.formats import tfrecord
from distributed.world import World
from plan import flags
from plan.plan import plan_for
from training.reading import TrainingInput
from training.state import Progress

SAMPLES, SHARDS, RATE = 1_281_167, 1024, 1000  # images/s of one worker, assumed
CASES = {1: (256, 2), 8: (2048, 9), 1024: (32_768, 36)}  # workers: (global batch size, epochs)


def write_shards(folder: Path) -> None:
    """Writes the dataset. Shards of the same size are links to one file."""
    image = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(image, "JPEG")
    files = []
    for number in range(SHARDS):
        size = SAMPLES * (number + 1) // SHARDS - SAMPLES * number // SHARDS
        if not (same := folder / f"{size}.tfrecord").exists():
            tfrecord.write(same, [(image.getvalue(), 0)] * size)
        for suffix in ("", ".idx"):
            Path(f"{folder}/{number}.tfrecord{suffix}").symlink_to(f"{same}{suffix}")
        files.append({"path": f"{number}.tfrecord", "samples": size})
    described = {"format": "tfrecord", "classes": ["0"], "image": {"mean": [127.5] * 3, "std": [64.0] * 3},
                 "train": {"samples": SAMPLES, "files": files},
                 "validation": {"samples": files[0]["samples"], "files": files[:1]}}
    (folder / "dataset.json").write_text(json.dumps(described))


def setup_of(dataset, workers: int):
    """Returns what TrainingInput needs of the first of `workers` workers."""
    batch_size, epochs = CASES[workers]
    settings = flags.parse(["train.py", f"--batch_size={batch_size}", f"--epochs={epochs}"])
    return SimpleNamespace(plan=plan_for(settings, workers, 1, SAMPLES), world=World(size=workers),
                           feed=Feed(dataset, 32, AUGMENTATIONS["crop_flip"], 0, 0, workers),
                           state=SimpleNamespace(progress=Progress()))


def gaps(setup, pipelines) -> list[float]:
    """Returns the seconds to the first batch of each epoch but the first. pipelines: a TrainingInput, or Separate."""
    seconds_of_each = []
    with pipelines:
        for interval in setup.plan.intervals():
            began = time.perf_counter()
            batches = pipelines.batches_of(interval)
            next(batches)
            seconds_of_each.append(time.perf_counter() - began)
            own = interval.steps * interval.phase.global_batch_size // setup.world.size
            for _ in range(own // interval.phase.micro_batch_size - 1):
                next(batches)
            setup.state.progress.step = interval.end
    return seconds_of_each[1:]


class Separate(contextlib.ExitStack):
    """Replaces TrainingInput: opens a pipeline for each interval."""

    def __init__(self, setup):
        super().__init__()
        self._feed = setup.feed

    def batches_of(self, interval):
        self.close()
        phase = interval.phase
        return self.enter_context(self._feed.train(interval.start, interval.steps, phase.global_batch_size,
                                                   phase.micro_batch_size))


def main():
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder))
        dataset = open_dataset(folder)
        for workers in CASES:
            seconds, setup = SAMPLES / workers / RATE, setup_of(dataset, workers)
            separate = statistics.median(gaps(setup, Separate(setup)))
            setup.state.progress.step = 0
            kept = gaps(setup, TrainingInput(setup))
            print(f"{workers} workers, epochs of {seconds:.1f} s: a gap of {separate:.2f} s ({separate / seconds:.1%}) "
                  f"with a pipeline for each epoch; {statistics.median(kept):.3f} s in the median and "
                  f"{max(kept):.2f} s at most ({max(kept) / seconds:.1%}) with TrainingInput", flush=True)


if __name__ == "__main__":
    main()
