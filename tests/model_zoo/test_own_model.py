"""--model=MODULE:FUNCTION: a network of the user's own, in the current folder."""
import json

import pytest
from conftest import DIGITS, ROOT, run

from common.errors import UsageError
from plan import flags

MODULE = """
import tensorflow as tf
from model_zoo.layers import BatchNormalization


def small(x, classes, batch_norm_momentum, seed):
    x = tf.keras.layers.Conv2D(4, 3, strides=4, use_bias=False)(x)
    x = tf.keras.layers.GlobalAveragePooling2D()(BatchNormalization(momentum=batch_norm_momentum)(x))
    return tf.keras.layers.Dense(classes, dtype="float32")(x)


def broken(x, classes, batch_norm_momentum, seed):
    raise ValueError("no layers")
"""


def test_it_trains_and_is_evaluated(tmp_path):
    (tmp_path / "own_networks.py").write_text(MODULE)
    words = (DIGITS, "--model=own_networks:small", "--image_size=32", "--epochs=0.2", f"--output_dir={tmp_path}/run")
    done = run("python", 1, ROOT / "train.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    again = run("python", 1, ROOT / "train.py", "--mode=evaluate", f"--checkpoint={tmp_path}/run/checkpoints",
                cwd=tmp_path)
    assert again.returncode == 0, again.stderr[-2000:]
    assert json.loads(again.stdout)["val_top1_count"] == json.loads(done.stdout)["val_top1_count"]


@pytest.mark.parametrize(("name", "says"), [
    ("own_networks:broken", "ValueError: no layers"), ("own_networks:absent", "AttributeError: "),
    ("no_such_module:small", "ModuleNotFoundError: No module named 'no_such_module'")])
def test_what_is_wrong_with_it_is_one_line(name, says, tmp_path):
    (tmp_path / "own_networks.py").write_text(MODULE)
    done = run("python", 1, ROOT / "train.py", DIGITS, f"--model={name}", "--image_size=32", cwd=tmp_path)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert done.returncode == 1 and f"--model={name}: {says}" in line and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["resnet2000", "keras:MobileNetV3Smal", "a b:c", ":x"])
def test_a_mistyped_name_is_none_of_ones_own(name):
    with pytest.raises(UsageError, match="value should be one of"):
        flags.parse(["train.py", f"--model={name}"])
