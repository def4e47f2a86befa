"""Measures how well --shuffle_group shuffles: on paper at ImageNet's size, and by the accuracy on sorted digits.

    uv run python -m benchmarks.groups [--seeds=3] [--output_dir=runs/groups]

The first table is of ImageNet's 1,281,167 samples in 1,024 shards that were written class by class, the worst case. For
each block and group: the fraction of neighbours in the stream that lie in the same 64 records of the same shard, the
median distance between neighbours as a fraction of the dataset, and the classes in a batch of 256 and of 8,192, all
next to those of a true shuffle. The second trains resnet20 on the digits, class by class in eight shards and shuffled
as data.prepare writes them, with the recipe of benchmarks.accuracy for LARS and batch 128: mean and deviation of the
validation top-1.
"""
import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.accuracy import COMMON, RECIPE
from data import order
from data.dataset import Split, open_dataset
from data.formats import tfrecord
from data.named import built_in
from experiments import sweep

SAMPLES, SHARDS, CLASSES = 1_281_167, 1024, 1000
ORDERS = ((64, 0), (64, 4), (64, 16), (64, 64), (64, 256))  # block, group
SORTED_SHARDS = 8
TRAINED = ((64, 0), (8, 4), (8, 16), (8, 64))  # the digits have 180 blocks of 8, ImageNet 20,480 of 64


def quality(samples: np.ndarray) -> dict:
    """Returns the figures of an order of samples that lie class by class."""
    distances, classes = np.abs(np.diff(samples)), samples * CLASSES // SAMPLES
    row = {"same run": round(float(np.mean(distances < 64)), 4),
           "median distance": round(float(np.median(distances)) / SAMPLES, 3)}
    for batch in (256, 8192):
        whole = classes[:len(classes) // batch * batch].reshape(-1, batch)
        row[f"classes in {batch}"] = round(float(np.mean([len(np.unique(labels)) for labels in whole])), 1)
    return row


def imagenet() -> Split:
    """Returns a training split of ImageNet's size. Its files do not exist."""
    sizes = tuple(np.diff(np.arange(SHARDS + 1) * SAMPLES // SHARDS).tolist())
    return Split("tfrecord", tuple(Path(f"{number}") for number in range(SHARDS)), sizes)


def on_paper():
    """Prints the first table."""
    split = imagenet()
    shuffled = np.random.default_rng(0).permutation(SAMPLES)
    print(json.dumps({"order": "true shuffle", **quality(shuffled)}), flush=True)
    for block, group in ORDERS:
        samples = order.permutation(split, 0, 0, block, group)
        print(json.dumps({"order": f"block {block}, group {group}", **quality(samples)}), flush=True)


def write_sorted(source: Path, folder: Path) -> None:
    """Writes a dataset again whose training records are sorted by class."""
    dataset = open_dataset(source)
    described = json.loads((source / "dataset.json").read_text())
    records = sorted((record for path, index in zip(dataset.train.paths, dataset.train.entries, strict=True)
                      for record in tfrecord.records(path, index, np.arange(len(index)))), key=lambda record: record[1])
    shutil.copytree(source, folder)
    described["train"]["files"] = []
    for number in range(SORTED_SHARDS):
        first, end = (len(records) * shard // SORTED_SHARDS for shard in (number, number + 1))
        tfrecord.write(folder / f"train-{number}.tfrecord", records[first:end])
        described["train"]["files"].append({"path": f"train-{number}.tfrecord", "samples": end - first})
    (folder / "dataset.json").write_text(json.dumps(described))


def trained(data: str, block: int, group: int, options) -> dict:
    """Trains with each seed and returns the row."""
    name = f"{Path(data).name}-{block}-{group}"
    rows = sweep.run(["benchmarks.groups", f"--flagfile={RECIPE}", *COMMON["digits"], f"--data_dir={data}",
                      "--optimizer=lars", "--batch_size=128", "--learning_rate=5", "--warmup_learning_rate=0.5",
                      f"--seeds={options.seeds}", f"--shuffle_block={block}", f"--shuffle_group={group}",
                      "--checkpoint_every=1000", f"--output_dir={options.output_dir / name}"])
    top1 = [row["val_top1"] for row in rows]
    return {"data": Path(data).name, "block": block, "group": group, "mean": round(statistics.mean(top1), 4),
            "deviation": round(statistics.stdev(top1), 4)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="at least 2 (default: 3)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/groups"))
    options = parser.parse_args()
    on_paper()
    with tempfile.TemporaryDirectory() as place:
        by_class = Path(place) / "sorted"
        write_sorted(built_in("digits"), by_class)
        for block, group in TRAINED:
            print(json.dumps(trained(str(by_class), block, group, options)), flush=True)
        print(json.dumps(trained("digits", 64, 0, options)), flush=True)


if __name__ == "__main__":
    main()
