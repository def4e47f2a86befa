"""The examples run as their first lines say, and the smallest one makes the same bits on two workers as on one."""
import re

import pytest
from conftest import ROOT, run

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
