"""Flags with which experiments.verify would train something else: refused by the run's name, before any training."""
import pytest

from common.errors import UserError
from experiments.verify import verified
from tests.rigs.run_files import whole


@pytest.mark.parametrize(("flag", "message"), [
    ("--learning_rate=1", "was trained with learning_rate 2, and not with 1; give what the run had"),
    ("--epochs=4", "was trained with epochs 3, and not with 4.0"),
    ("--data_dir=synthetic:500", "was trained with train_samples 1000, and not with 500"),
    ("--learning_rate=2.0", "no evaluation follows a checkpoint"), ("--seed=0", "no evaluation follows a checkpoint")])
def test_another_training_is_refused(flag, message, tmp_path):
    """Not by the name of the temporary copy, whose training would advise to choose another --output_dir."""
    folder = whole(tmp_path / "run", model="convnet", image_size="32", data_dir="synthetic:1000", deterministic="true")
    with pytest.raises(UserError, match=message) as raised:
        verified(str(folder), None, [flag])
    assert "output_dir" not in str(raised.value)
