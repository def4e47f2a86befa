"""Compares the speed of training with different flags, in steps per second relative to the first.

    uv run python -m benchmarks.training_costs --of=faults [--rounds=3] [--workers=2]
    uv run python -m benchmarks.training_costs --of=exchange --workers=4
    uv run python -m benchmarks.training_costs --of=deterministic --workers=4

faults: --deterministic, and checkpoints every twentieth of an epoch, which is every step here, far more often than
needed. This shows the cost of writing in the background. exchange: ring and torus, float32 and float16. deterministic:
the same bits on this number of workers, and on any number.

Every round trains the digits once with each set of flags, in turn. The output shows the medians of the ratios to the
first set. The rate of a training excludes its first epoch, which compiles.
"""
import argparse
import json
import statistics
import tempfile
from pathlib import Path

from tests.rigs.trainings import start

CANDIDATES = {
    "faults": {
        "plain": ("--checkpoint_every=1000",),
        "--deterministic": ("--checkpoint_every=1000", "--deterministic"),
        "a checkpoint per epoch": ("--checkpoint_every=1",),
        "a checkpoint per step": ("--checkpoint_every=0.05",),
    },
    "exchange": {
        "ring": (),
        "torus": ("--allreduce=torus",),
        "ring, float16": ("--compression=fp16",),
        "torus, float16": ("--allreduce=torus", "--compression=fp16"),
    },
    "deterministic": {
        "same_workers": ("--deterministic=same_workers", "--micro_batch_size=32"),
        "any number of workers": ("--deterministic", "--micro_batch_size=32"),
    },
}


def rate(workers: int, *flags: str) -> float:
    """Trains and returns steps per second, without evaluations."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        if start(folder, workers, flags).wait(600):
            raise RuntimeError(Path(f"{folder}.log").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
        return statistics.median(row["images_per_second"] / row["batch_size"] for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--of", choices=CANDIDATES, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="resnet20")
    options = parser.parse_args()
    candidates = CANDIDATES[options.of]
    rates, first = {name: [] for name in candidates}, next(iter(candidates))
    for _ in range(options.rounds):
        for name, flags in candidates.items():
            rates[name].append(rate(options.workers, f"--model={options.model}", "--epochs=5", *flags))
    for name, measured in rates.items():
        ratio = statistics.median(a / b for a, b in zip(measured, rates[first], strict=True))
        print(f"{name:24s} {statistics.median(measured):6.2f} steps/s, {ratio:.2f} x {first}")


if __name__ == "__main__":
    main()
