"""Does a change of the code change the accuracy of training? Run it before and after: the gate for such a change.

    uv run --group benchmark python -m benchmarks.accuracy --output_dir=runs/accuracy [--dataset=digits] [--seeds=5]
        [--before=benchmarks/accuracy.json]

It trains two networks with LARS and with SGD: resnet20, which has batch norm, on `digits`, and convnet, which has none,
on the letters of benchmarks.glyphs. Each runs at a small and a large batch, with five seeds, and otherwise with the
recipe of the digits. Standard output carries a JSON list with a row per network, optimizer and batch size: mean,
standard deviation (of a sample), lowest and highest validation top-1 after the last epoch. With --before, the output of
an earlier version, the exit code is 1 if a mean is lower by more than the seeds explain; `benchmarks/accuracy.json` is
that of 0.9.0. About 20 minutes on two cores, if each dataset has a process and a core of its own. If it is stopped, the
same command continues.
"""
import argparse
import json
import statistics
import sys
from pathlib import Path

from scipy.stats import ttest_ind_from_stats

from benchmarks import glyphs
from experiments import sweep

RECIPE = Path(__file__).parents[1] / "recipes/digits.flags"
COMMON = {
    "digits": ("--epochs=8",),
    "glyphs": ("--epochs=5", "--model=convnet", "--image_size=28", "--augmentation=none", "--weight_decay=5e-4"),
}
RATES = {  # learning rate by dataset, optimizer and batch size
    ("digits", "lars", 128): 5, ("digits", "lars", 512): 10, ("digits", "sgd", 128): 0.1, ("digits", "sgd", 512): 0.4,
    ("glyphs", "lars", 256): 10, ("glyphs", "lars", 1024): 20, ("glyphs", "sgd", 256): 0.1,
    ("glyphs", "sgd", 1024): 0.1,
}
WARMUP = {"lars": 0.5, "sgd": 0.0}  # the rate at which it starts
CHANCE = 0.01  # of a false alarm, over all rows
KEYS = "dataset", "optimizer", "batch_size"


def measure(folder: Path, dataset: str, optimizer: str, batch: int, seeds: int) -> dict:
    """Trains with each seed and returns the row."""
    data_dir = dataset
    if dataset == "glyphs":
        data_dir = folder / "data"
        glyphs.write(data_dir)
    rows = sweep.run([
        "benchmarks.accuracy", f"--flagfile={RECIPE}", f"--data_dir={data_dir}", *COMMON[dataset],
        f"--optimizer={optimizer}", f"--batch_size={batch}", f"--learning_rate={RATES[dataset, optimizer, batch]}",
        f"--seeds={seeds}", f"--warmup_learning_rate={WARMUP[optimizer]}", "--checkpoint_every=1000",
        f"--output_dir={folder / f'{dataset}-{optimizer}-{batch}'}"])
    top1 = [row["val_top1"] for row in rows]
    return {"dataset": dataset, "optimizer": optimizer, "batch_size": batch, "seeds": seeds,
            "mean": round(statistics.mean(top1), 5), "deviation": round(statistics.stdev(top1), 5),
            "lowest": round(min(top1), 5), "highest": round(max(top1), 5)}


def lower(rows: list[dict], before: list[dict]) -> list[str]:
    """Returns a line for each row whose mean is lower than before (Welch's t-test, one-sided; Bonferroni)."""
    found, earlier = [], {tuple(row[key] for key in KEYS): row for row in before}
    for row in rows:
        cell = tuple(row[key] for key in KEYS)
        sides = [(side["mean"], max(side["deviation"], 1e-9), side["seeds"]) for side in (row, earlier[cell])]
        chance = ttest_ind_from_stats(*sides[0], *sides[1], equal_var=False, alternative="less").pvalue
        if chance < CHANCE / len(rows):
            found.append(f"{' '.join(map(str, cell))}: {sides[0][0]:.2%}, before {sides[1][0]:.2%} (p = {chance:.1g})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", type=Path, default="runs/accuracy")
    parser.add_argument("--dataset", choices=COMMON, help="measure this one only (both by default)")
    parser.add_argument("--seeds", type=int, default=5, help="at least 2 (default: 5)")
    parser.add_argument("--before", type=Path, help="output of an earlier version")
    options = parser.parse_args()
    before = json.loads(options.before.read_text()) if options.before else None
    options.output_dir.mkdir(parents=True, exist_ok=True)
    rows = [measure(options.output_dir, *cell, options.seeds) for cell in RATES if options.dataset in (None, cell[0])]
    print(json.dumps(rows, indent=1))
    if before and (found := lower(rows, before)):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
