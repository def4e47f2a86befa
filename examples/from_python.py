"""Starts trainings from a Python script, or from the cells of a notebook, and reads their results.

    uv run python -m examples.from_python
"""
import json
import subprocess
import sys
from pathlib import Path

APP = Path(__file__).parents[1] / "train.py"


def train(output_dir: str | Path, *flags: str, workers: int = 1) -> dict:
    """Trains in processes of its own. Returns the content of summary.json. Raises CalledProcessError."""
    launcher = [Path(sys.executable).with_name("horovodrun"), "--gloo", "-np", str(workers)] if workers > 1 else []
    subprocess.run([*launcher, sys.executable, APP, f"--output_dir={output_dir}", *flags], stdout=subprocess.DEVNULL,
                   check=True)
    return json.loads((Path(output_dir) / "summary.json").read_text())


def epochs(output_dir: str | Path) -> list[dict]:
    """Returns the metrics of each evaluation of a run."""
    return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    for rate in ("4", "8"):
        run = Path("runs") / f"from_python-{rate}"
        summary = train(run, "--data_dir=digits", "--model=resnet10_narrow", "--image_size=16", "--epochs=2",
                        f"--learning_rate={rate}")
        losses = [round(row["val_loss"], 3) for row in epochs(run)]
        print(f"learning rate {rate}: top-1 {summary['best_top1']:.1%}, validation losses {losses}")
