"""Small sets of photographs with the defaults: how accurate, and at what cost, compared with Keras's tutorial?

    uv run --group benchmark python -m benchmarks.small_sets --output_dir=runs/small_sets [--sets=shapes-10,...]

On each of the sets of benchmarks.sets, named NAME-IMAGES with the number of images per class, it trains `train.py
--data_dir` (flags after the command's own are for it) and the two networks of the tutorial
(benchmarks/peers/keras_tutorial.py). These train for as many epochs as the tutorial has, and then go on until they have
had as much processor time as train.py. The defaults may be chosen on the sets of CHOSEN alone.

A line of JSON per set: the means over the seeds of the validation top-1 of bigbatch, keras and keras_augmented; how far
bigbatch is above the better network of the tutorial, and the standard error of this mean difference, which are None for
one seed; median processor seconds of bigbatch, and of that network at its own number of epochs. If it is stopped, the
same command continues.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.sets import make

ROOT = Path(__file__).parents[1]
CHOSEN = ("digits-100", "flowers-100")
SETS = ("shapes-10", "textures-10", "flowers-10", "clothes-30", "stamps-30", "textures-100", "stamps-100", "shapes-300",
        "clothes-300", "digits-900", *CHOSEN)
TUTORIAL = {"keras": (), "keras_augmented": ("--augment",)}


def measured(*command) -> tuple[str, float]:
    """Runs a Python program. Returns its standard output and its processor seconds."""
    before = os.times()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    after = os.times()
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return done.stdout, (after.children_user + after.children_system - before.children_user - before.children_system)


def ours(data: Path, seed: int, flags) -> dict:
    """Returns the top-1 and the processor seconds of train.py."""
    out, seconds = measured("train.py", f"--data_dir={data}", f"--seed={seed}", "--resume=never", *flags,
                            f"--output_dir={data.parent / f'run-{data.name}-{seed}'}")
    return {"top1": json.loads(out)["val_top1"], "seconds": round(seconds, 1)}


def tutorial(data: Path, seed: int, program: str, seconds: float) -> dict:
    """Returns the top-1 after `seconds` of processor time and at the tutorial's epochs, and the seconds until these."""
    out, _ = measured("-m", "benchmarks.peers.keras_tutorial", str(data), str(seed), f"--seconds={seconds}",
                      *TUTORIAL[program])
    return json.loads(out.splitlines()[-1])


class Results:
    """What results.jsonl of a folder has, and what is measured now."""

    def __init__(self, folder: Path):
        self._path = folder / "results.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else ()
        self._rows = {(row["set"], row["program"], row["seed"]): row for row in map(json.loads, lines)}

    def row(self, name: str, program: str, seed: int, measure) -> dict:
        """Returns a measured row. measure: is called if it has not been measured yet."""
        key = name, program, seed
        if key not in self._rows:
            self._rows[key] = dict(zip(("set", "program", "seed"), key, strict=True)) | measure()
            with self._path.open("a") as file:
                print(json.dumps(self._rows[key]), file=file)
        return self._rows[key]


def line(folder: Path, name: str, seeds: int, flags) -> dict:
    """Returns the line of a set."""
    data, results = folder / name, Results(folder)
    if not (data / "val").is_dir():
        kind, images = name.rsplit("-", 1)
        make(data, kind, int(images))
    mine = [results.row(name, "bigbatch", seed, lambda seed=seed: ours(data, seed, flags)) for seed in range(seeds)]
    budget = statistics.median(row["seconds"] for row in mine)
    theirs = {program: [results.row(name, program, seed, lambda program=program, seed=seed: tutorial(
        data, seed, program, budget)) for seed in range(seeds)] for program in TUTORIAL}

    def mean(rows):
        return statistics.mean(row["top1"] for row in rows)

    best = max(theirs.values(), key=mean)
    above = [one["top1"] - other["top1"] for one, other in zip(mine, best, strict=True)]
    return {"set": name, "bigbatch": mean(mine), **{program: mean(rows) for program, rows in theirs.items()},
            "above": statistics.mean(above), "error": statistics.stdev(above) / seeds ** 0.5 if seeds > 1 else None,
            "seconds": budget, "tutorial_seconds": statistics.median(row["own_seconds"] for row in best)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", type=Path, default="runs/small_sets")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--seeds", type=int, default=5)
    options, flags = parser.parse_known_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for name in options.sets.split(","):
        row = line(options.output_dir.absolute(), name, options.seeds, flags)
        print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}),
              flush=True)


if __name__ == "__main__":
    main()
