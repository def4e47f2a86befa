"""The examples run as their first lines say, and the smallest one makes the same bits on two workers as on one."""
import re

import pytest
from conftest import DIGITS, ROOT, run, train

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


def test_a_network_of_keras_trains_to_the_same_bits_on_two_workers(tmp_path):
    """Batch norm inside a nested model, with moving statistics, and dropout."""
    flags = (DIGITS, "--model=examples.own_network:network", "--image_size=16", "--epochs=1", "--deterministic",
             "--batch_size=96", "--micro_batch_size=8", "--batch_norm_span=8", "--batch_norm_statistics=moving")
    said = train(*flags, f"--output_dir={tmp_path}/1").stderr
    assert "the model gets pixels from 0 to 255, which its layer rescaling scales" in said
    train(*flags, f"--output_dir={tmp_path}/2", kind="mpirun", workers=2)
    assert differences(tmp_path / "1", tmp_path / "2") == []
