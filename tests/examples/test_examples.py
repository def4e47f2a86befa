"""The examples run as their first lines say, and the smallest one makes the same bits on two workers as on one."""
import csv
import json
import re

import pytest
from conftest import DIGITS, ROOT, TINY, printed_json, rows, run, train

from examples import from_python
from examples.own_observer import NAMES
from tests.rigs.trainings import differences

pytestmark = pytest.mark.trainings


def printed(name: str, kind: str = "python", workers: int = 1) -> str:
    done = run(kind, workers, "-m", f"examples.{name}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_smallest_training_makes_the_same_bits_on_two_workers():
    alone = printed("minimal")
    assert re.fullmatch(r"top-1 0\.9[6-9]\d\d, weights [0-9a-f]{16}\n", alone)
    assert printed("minimal", "mpirun", 2) == alone
    assert len((ROOT / "examples" / "minimal.py").read_text().splitlines()) <= 120


def test_the_feed_alone():
    assert printed("feed") == "uint8 (64, 32, 32, 3) (64, 1)\n"


def test_the_torus_alone():
    assert float(printed("torus", "mpirun", 4).removeprefix("training accuracy ")) > 0.9


def test_trainings_from_python(tmp_path):
    done = run("python", 1, "-m", "examples.from_python", cwd=tmp_path)
    lines = done.stdout.splitlines()
    for rate, line in zip((4, 8), lines, strict=True):
        summary = json.loads((tmp_path / f"runs/from_python-{rate}/summary.json").read_text())
        losses = [round(row["val_loss"], 3) for row in rows(tmp_path / f"runs/from_python-{rate}")]
        assert len(losses) == 2 and line == (
            f"learning rate {rate}: top-1 {summary['best_top1']:.1%}, validation losses {losses}")
    summary = from_python.train(tmp_path / "two", DIGITS, *TINY, "--epochs=0.2", workers=2)
    assert (summary["world_size"], len(from_python.epochs(tmp_path / "two"))) == (2, 1)


def test_a_network_of_keras_trains_to_the_same_bits_on_two_workers(tmp_path):
    """Batch norm inside a nested model, with moving statistics, and dropout; an augmentation and an observer, too."""
    flags = (DIGITS, "--model=examples.own_network:network", "--image_size=16", "--epochs=1", "--deterministic",
             "--batch_size=96", "--micro_batch_size=8", "--batch_norm_span=8", "--batch_norm_statistics=moving",
             "--augmentation=examples.own_augmentation:LARGE_CROPS", "--observer=examples.own_observer:Table")
    said = train(*flags, f"--output_dir={tmp_path}/1").stderr
    assert "the model gets pixels from 0 to 255, which its layer rescaling scales" in said
    train(*flags, f"--output_dir={tmp_path}/2", kind="mpirun", workers=2)
    assert differences(tmp_path / "1", tmp_path / "2") == []
    with open(tmp_path / "1" / "epochs.csv") as file:
        [line] = csv.DictReader(file)
    [row] = rows(tmp_path / "1")
    assert {name: float(text) for name, text in line.items()} == {name: row[name] for name in NAMES}
    assert "--augmentation=examples.own_augmentation:LARGE_CROPS" in (tmp_path / "1" / "flags.txt").read_text()
    evaluated = train("--mode=evaluate", f"--checkpoint={tmp_path}/1/checkpoints")
    assert printed_json(evaluated)["val_top1"] == row["val_top1"]
