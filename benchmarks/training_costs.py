"""Compares the speed of training with different flags, in steps per second relative to the first.

    uv run python -m benchmarks.training_costs --of=faults [--rounds=3] [--workers=2]
    uv run python -m benchmarks.training_costs --of=exchange --workers=4
    uv run python -m benchmarks.training_costs --of=deterministic --workers=4
    uv run python -m benchmarks.training_costs --of=muon --model=resnet18
    uv run python -m benchmarks.training_costs --of=keras

faults: --deterministic, and checkpoints every twentieth of an epoch, which is every step here, far more often than
needed. This shows the cost of writing in the background. exchange: ring and torus, float32 and float16. deterministic:
the same bits on this number of workers, and on any number. muon: how long its orthogonalization takes, and what workers
gain that share it.

Every round trains the digits once with each set of flags, in turn. The output shows the medians of the ratios to the
first set. The rate of a training excludes its first epoch, which compiles.

keras: the update of train.py and of Keras's `fit` on one worker, ResNet-20 at 32 pixels, batch 128, on images that are
in memory; train.py decodes them. Batch norm covers the micro-batch, as in Keras, or groups of 32 images. The processor
seconds of an update are the difference between processes of SHORT and of LONG updates. Both evaluate 4 % as many
images.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.rigs.trainings import start

MUON = ("--optimizer=muon", "--learning_rate=0.02", "--warmup_learning_rate=0")
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
    "muon": {
        "LARS": (),
        "Muon": (*MUON, "--share_orthogonalization=false"),
        "Muon, shared": (*MUON, "--share_orthogonalization=true"),
    },
}
SHORT, LONG = 50, 250  # updates
BATCH = 128
TRAIN = (sys.executable, "train.py", "--model=resnet20", "--image_size=32", f"--batch_size={BATCH}", "--optimizer=sgd",
         "--learning_rate=0.001", "--label_smoothing=0", "--augmentation=none", "--warmup=none",
         "--checkpoint_every=1000", "--data_dir=synthetic:{samples}", "--epochs=1", "--output_dir={folder}")
UPDATES = {
    "Keras's fit": (sys.executable, "-m", "benchmarks.peers.keras_fit", "resnet20", "32", str(BATCH), "{steps}"),
    "train.py, micro-batch 128": (*TRAIN, "--micro_batch_size=128", "--batch_norm_span=128"),
    "the same, batch norm over 32": (*TRAIN, "--micro_batch_size=128", "--batch_norm_span=32"),
    "train.py, micro-batch 64": (*TRAIN, "--micro_batch_size=64", "--batch_norm_span=64"),
}


def processor_seconds(command: tuple[str, ...], steps: int) -> float:
    """Runs a process for so many updates. Returns the seconds of all of its threads."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [word.format(steps=steps, samples=steps * BATCH, folder=f"{scratch}/run") for word in command]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(words)} failed")
    return used.ru_utime + used.ru_stime


def show_updates(rounds: int) -> None:
    """Measures UPDATES in turn, and prints the medians and the median of the ratios to the first."""
    costs = {name: [] for name in UPDATES}
    for _ in range(rounds):
        for name, command in UPDATES.items():
            short, long = (processor_seconds(command, steps) for steps in (SHORT, LONG))
            costs[name].append((long - short) / (LONG - SHORT))
    for name, measured in costs.items():
        ratios = [a / b for a, b in zip(measured, costs[next(iter(UPDATES))], strict=True)]
        print(f"{name:30s}{1000 * statistics.median(measured):6.1f} ms of processor, {statistics.median(ratios):.2f} x "
              f"({min(ratios):.2f} to {max(ratios):.2f})")


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
    parser.add_argument("--of", choices=[*CANDIDATES, "keras"], required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="resnet20")
    options = parser.parse_args()
    if options.of == "keras":
        show_updates(options.rounds)
        return
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
