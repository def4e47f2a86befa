"""Compares the speed of data.prepare on two ranks and on one, and with a program that only decodes and copies.

    uv run python -m benchmarks.prepare [--photos=2000] [--rounds=5] [--format=recordio]

Every round measures all candidates in turn, so that a drift of the machine's speed affects all candidates alike. The
output shows the median rates and the median of the ratios per round. The rates of data.prepare are those that it
prints: from the listing to dataset.json, without the start of Python.
"""
import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import photos

BIN = Path(sys.executable).parent
SHARD_SAMPLES = 128  # small, so that 2,000 photographs fill enough shards to distribute, as ImageNet does


def prepare(source: Path, ranks: int, format_: str, *flags: str) -> float:
    """Runs data.prepare. Returns images per second."""
    mpirun = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        done = subprocess.run(
            [*mpirun, sys.executable, "-m", "data.prepare", f"--source={source}", f"--output={scratch}/o",
             f"--format={format_}", "--validation_fraction=0.05", f"--shard_samples={SHARD_SAMPLES}", *flags],
            capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True)
    return float(re.search(r"([\d,]+) images/s", done.stderr)[1].replace(",", ""))


def decode_and_copy(source: Path) -> float:
    """Decodes each whole file with libjpeg-turbo and writes its bytes to one file. Returns images per second."""
    import simplejpeg

    paths = sorted(source.glob("*/*.jpg"))
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        begun = time.perf_counter()
        with open(Path(scratch) / "copy", "wb") as copy:
            for path in paths:
                encoded = path.read_bytes()
                simplejpeg.decode_jpeg(encoded)
                copy.write(encoded)
        return len(paths) / (time.perf_counter() - begun)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--format", default="recordio")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "bigbatch-photos")
    options = parser.parse_args()
    source = photos.make(options.folder / str(options.photos), options.photos)
    candidates = {
        "decode and copy, one process": lambda: decode_and_copy(source),
        "prepare --verify, 1 rank": lambda: prepare(source, 1, options.format, "--verify"),
        "prepare --verify, 2 ranks": lambda: prepare(source, 2, options.format, "--verify"),
        "prepare --resize_shorter=256, 1 rank": lambda: prepare(source, 1, options.format, "--resize_shorter=256"),
        "prepare --resize_shorter=256, 2 ranks": lambda: prepare(source, 2, options.format, "--resize_shorter=256"),
    }
    rates = {name: [] for name in candidates}
    for _ in range(options.rounds):
        for name, measure in candidates.items():
            rates[name].append(measure())
    print(f"{options.photos} photographs, {options.format}, {options.rounds} rounds")
    for name, measured in rates.items():
        print(f"{name:40s} {statistics.median(measured):8,.0f} images/s")

    def ratio(one, other):
        return statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))

    decode_copy, one, two, small_one, small_two = candidates
    print(f"2 ranks to 1, --verify: {ratio(two, one):.2f} x the rate (target: 1.7)")
    print(f"2 ranks to 1, --resize_shorter: {ratio(small_two, small_one):.2f} x the rate (target: 1.7)")
    print(f"1 rank --verify to decode and copy: {ratio(decode_copy, one):.2f} x the time (target: at most 1.2)")
    if shutil.disk_usage(options.folder).free < 1e9:
        print("the disk is nearly full, so the rates may vary")


if __name__ == "__main__":
    main()
