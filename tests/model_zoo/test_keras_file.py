"""A user's keras.json, which is for other programs, changes no network, no optimizer and no training."""
import json

import pytest
from conftest import DIGITS, ROOT, TINY, printed_json, rows, run

FILES = {"other": {"floatx": "float64", "image_data_format": "channels_first", "epsilon": 0.1, "backend": "jax"},
         "invalid here": {"floatx": "bfloat16", "epsilon": 1}}
# Prints the checksums of networks, and of one after an update by each optimizer.
NETWORKS = """
import sys
from common import command
with command.shell("networks") as ending:
    import tensorflow as tf
    import model_zoo, optim
    from training.weight_check import checksum
    for name in ("resnet10_narrow", "convnet", "keras:MobileNetV3Small"):
        model = model_zoo.create_model(name, 5, 32, seed=3)
        print(name, len(model.variables), int(checksum(model.variables)))
    for name in optim.OPTIMIZERS:
        model = model_zoo.create_model("convnet", 5, 32, seed=3)
        optimizer = optim.create_optimizer(name, learning_rate=0.1, momentum=0.9, weight_decay=1e-4)
        optimizer.apply_gradients([(variable / 7, variable) for variable in model.trainable_variables])
        print(name, int(checksum(model.variables)))
sys.exit(ending.code)
"""


@pytest.fixture
def write_keras_file(tmp_path, monkeypatch):
    """A function that writes one of FILES where Keras looks for it: in ~/.keras and in KERAS_HOME."""
    def write(name):
        (tmp_path / ".keras").mkdir(exist_ok=True)
        (tmp_path / ".keras" / "keras.json").write_text(json.dumps(FILES[name]))
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("KERAS_HOME", f"{tmp_path}/.keras")

    return write


@pytest.mark.trainings
def test_networks_and_updates_are_the_same(write_keras_file):
    without = run("python", 1, "-c", NETWORKS)
    for name in FILES:
        write_keras_file(name)
        done = run("python", 1, "-c", NETWORKS, cold=True)
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 9, done.stderr
        assert done.stdout == without.stdout, name


@pytest.mark.trainings
def test_a_training_and_its_evaluation_are_the_same(write_keras_file, digits, tmp_path, monkeypatch):
    flags = (DIGITS, *TINY, f"--data_dir={digits}", "--epochs=1", "--deterministic")
    without = run("python", 1, ROOT / "train.py", *flags, f"--output_dir={tmp_path}/without")
    write_keras_file("other")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")  # for which this environment has no package
    done = run("python", 1, ROOT / "train.py", *flags, f"--output_dir={tmp_path}/with", cold=True)
    assert done.returncode == without.returncode == 0, done.stderr
    assert rows(tmp_path / "with")[0]["weights"] == rows(tmp_path / "without")[0]["weights"]
    again = run("python", 1, ROOT / "train.py", "--mode=evaluate", f"--checkpoint={tmp_path}/with", cold=True)
    assert printed_json(again)["val_loss"] == printed_json(without)["val_loss"]
