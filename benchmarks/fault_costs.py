"""What it costs to be ready for faults: steps per second with --deterministic and with frequent checkpoints.

    uv run python -m benchmarks.fault_costs [--rounds=3] [--workers=2]

Every round trains the digits once with each, in turn; printed are the medians of each round's ratios to a training
without. A training's rate is that of its epochs but the first, which compiles. Checkpoints every twentieth of an epoch
are every step here, far more often than anyone would: what is left of the rate is the price of writing meanwhile.
"""
import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.faults import start

CANDIDATES = {
    "plain": ("--checkpoint_every=1000",),
    "--deterministic": ("--checkpoint_every=1000", "--deterministic"),
    "a checkpoint an epoch": ("--checkpoint_every=1",),
    "a checkpoint a step": ("--checkpoint_every=0.05",),
}


def rate(workers: int, *flags: str) -> float:
    """Steps a second, evaluations left out."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        if start(folder, workers, flags).wait(600):
            raise RuntimeError(Path(f"{folder}.log").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
        return statistics.median(row["images_per_second"] / row["batch_size"] for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="resnet20")
    options = parser.parse_args()
    rates = {name: [] for name in CANDIDATES}
    for _ in range(options.rounds):
        for name, flags in CANDIDATES.items():
            rates[name].append(rate(options.workers, f"--model={options.model}", "--epochs=5", *flags))
    for name, measured in rates.items():
        ratio = statistics.median(a / b for a, b in zip(measured, rates["plain"], strict=True))
        print(f"{name:24s} {statistics.median(measured):6.2f} steps/s, {ratio:.2f} of plain")


if __name__ == "__main__":
    main()
