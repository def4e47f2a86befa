"""What the ways of training cost: steps per second of each, in parts of the first.

    uv run python -m benchmarks.training_costs --of=faults [--rounds=3] [--workers=2]
    uv run python -m benchmarks.training_costs --of=exchange --workers=4

faults: --deterministic, and checkpoints every twentieth of an epoch, which are every step here, far more often than
anyone would: what is left of the rate is the price of writing meanwhile. exchange: ring and torus, float32 and float16.

Every round trains the digits once with each, in turn; printed are the medians of each round's ratios to the first. A
training's rate is that of its epochs but the first, which compiles.
"""
import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.faults import start

CANDIDATES = {
    "faults": {
        "plain": ("--checkpoint_every=1000",),
        "--deterministic": ("--checkpoint_every=1000", "--deterministic"),
        "a checkpoint an epoch": ("--checkpoint_every=1",),
        "a checkpoint a step": ("--checkpoint_every=0.05",),
    },
    "exchange": {
        "ring": (),
        "torus": ("--allreduce=torus",),
        "ring, float16": ("--compression=fp16",),
        "torus, float16": ("--allreduce=torus", "--compression=fp16"),
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
        print(f"{name:24s} {statistics.median(measured):6.2f} steps/s, {ratio:.2f} of {first}")


if __name__ == "__main__":
    main()
