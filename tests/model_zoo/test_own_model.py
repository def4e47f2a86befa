"""--model=MODULE:FUNCTION: a network of the user's own, in the current folder."""
import json
import re

import numpy as np
import pytest
import tensorflow as tf
from conftest import DIGITS, ROOT, run

import model_zoo
from common.activity import startup
from common.errors import UsageError, UserError
from model_zoo import custom
from model_zoo.layers import input_numbers, layers_of, make_own, masks_at, norms
from plan import flags
from training.batch_norm import MICRO_BATCH, MovingStatistics, flat_statistics

MODULE = """
import os
import tensorflow as tf
from model_zoo.layers import BatchNormalization

print("imported")
os.chdir("/")


class Telling(tf.keras.layers.Layer):
    def call(self, x):
        print("traced", x.shape)
        return x


class Log:
    def __init__(self):
        print("made")

    def evaluation(self, evaluation):
        os.chdir("/usr")
        os.system("echo evaluated")


def small(x, classes, batch_norm_momentum, seed):
    print("called")
    os.chdir("/usr")
    x = Telling()(x)
    x = tf.keras.layers.Conv2D(4, 3, strides=4, use_bias=False)(x)
    x = tf.keras.layers.GlobalAveragePooling2D()(BatchNormalization(momentum=batch_norm_momentum)(x))
    return tf.keras.layers.Dense(classes, dtype="float32")(x)


def broken(x, classes, batch_norm_momentum, seed):
    raise ValueError("no layers")
"""

PIXELS = np.random.default_rng(0).uniform(0, 255, (8, 16, 16, 3)).astype(np.float32)


def network(name):
    return model_zoo.create_model(f"tests.rigs.networks:{name}", 3, 16, batch_norm_momentum=0.7, seed=3)


def test_it_trains_and_is_evaluated(tmp_path):
    """It prints, as an observer does, and moves to other folders. Standard output is JSON, and paths stay."""
    (tmp_path / "own_networks.py").write_text(MODULE)
    words = (DIGITS, "--model=own_networks:small", "--observer=own_networks:Log", "--image_size=32", "--epochs=0.2")
    done = run("python", 1, ROOT / "train.py", *words, "--output_dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    said = {"imported", "called", "traced (None, 32, 32, 3)", "made", "evaluated"}
    assert said <= {*done.stderr.splitlines()} and (tmp_path / "run/summary.json").is_file()
    again = run("python", 1, ROOT / "train.py", "--mode=evaluate", "--checkpoint=run/checkpoints", cwd=tmp_path)
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


@pytest.mark.parametrize(("name", "observed"), [
    ("nested", ["first", "second", "third"]), ("custom", ["batch_normalization", "third"]),
    ("subclassed", ["batch_normalization"]), ("frozen", ["third"]), ("inference", ["third"])])
def test_batch_norm_of_keras_computes_the_same_at_any_depth(name, observed, monkeypatch):
    """As Keras's own layers, before they are replaced. Frozen ones, and those without training, have no statistics."""
    theirs = []

    def recorded(model, *rest):
        theirs.append(model(PIXELS, training=True).numpy())
        make_own(model, *rest)

    monkeypatch.setattr(custom, "make_own", recorded)
    model = network(name)
    moving = MovingStatistics(model)
    with MICRO_BATCH.applied_to(model) as statistics:
        np.testing.assert_allclose(model(PIXELS, training=True), theirs[0], rtol=1e-3, atol=1e-4)
    moving.move(flat_statistics(statistics), tf.constant(0))  # of as many layers
    assert [re.sub(r"_[0-9]+$", "", layer.name) for layer in norms(model)] == observed
    assert {layer.momentum for layer in norms(model)} == {0.7}


def test_moving_statistics_are_those_of_the_batch_at_depth():
    """The inputs of the first batch norm, by hand: the product of the pixels and a matrix."""
    model = network("nested")
    convolution, first = (next(layer for layer in layers_of(model) if kind(layer)) for kind in (
        lambda layer: hasattr(layer, "kernel"), lambda layer: layer.name == "first"))
    moving = MovingStatistics(model)
    with MICRO_BATCH.applied_to(model) as statistics:
        model(PIXELS, training=True)
    moving.move(flat_statistics(statistics), tf.constant(0))
    moving.write()
    values = PIXELS.reshape(-1, 3).astype(np.float64) @ convolution.kernel.numpy()[0, 0] + convolution.bias.numpy()
    np.testing.assert_allclose(first.moving_mean, values.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(first.moving_variance, values.var(axis=0, ddof=1), rtol=1e-3)


def test_dropout_of_keras_has_masks_by_position_at_any_depth():
    """A batch has the masks of its two halves. Spatial dropout drops whole channels."""
    model = network("masks")

    def at(position, images):
        with masks_at(model, tf.constant(position, tf.int64)):
            return model(images, training=True).numpy()

    whole = at(40, PIXELS)
    np.testing.assert_allclose(whole, np.concatenate([at(40, PIXELS[:4]), at(44, PIXELS[4:])]), rtol=1e-4, atol=1e-4)
    assert (whole == at(40, PIXELS)).all() and (whole != at(48, PIXELS)).any()
    spatial = next(layer for layer in layers_of(model) if "spatial" in layer.name)
    with masks_at(model, tf.constant(0, tf.int64)):
        dropped = spatial(tf.ones([8, 4, 4, 6]), training=True).numpy().reshape(8, 16, 6)
    assert (dropped == dropped[:, :1]).all() and {*dropped.flat} == {0, 2}


@pytest.mark.parametrize(("name", "is_normalized", "says"), [
    ("nested", True, ""), ("log_softmax", True, ""), ("plain_model", True, "the model gets normalized pixels"),
    ("rescaling", False, "the model gets pixels from 0 to 255, which its layer rescaling"),
    ("preprocessing", False, "the model gets pixels from 0 to 255, which its layer tf"),
    ("scaled_twice", True, "scales pixels that are normalized already"),
    ("noise", True, "layer gaussian_noise"), ("rescaling", False, "layer random_flip")])
def test_what_it_gets_is_said(name, is_normalized, says, monkeypatch, capfd):
    monkeypatch.setattr(startup, "is_open", True)  # as on rank 0 of a training
    assert bool(input_numbers(network(name))) == is_normalized
    said = capfd.readouterr().err
    assert says in said and bool(said) == bool(says)


PROBABILITIES = "its outputs are probabilities, of which"
REFUSED = {
    **dict.fromkeys(("softmax", "softmax_inside", "softmax_of_ones_own", "sigmoid"), PROBABILITIES),
    "thousand": r"\(batch, 1000\), and the data 3 classes", "maps": r"\(batch, 16, 16, 3\), and",
    "nothing": "returns None; return", "two": "returns tuple; return", "numbers": "returns ndarray; return",
    "leaves": "SystemExit: no data", "other_arguments": "TypeError: .* argument 'classes'",
    "other_size": r"ValueError: .*\(None, 32, 32, 3\)", "shared": "layer first is called more than once",
    "channels_first": "layer rows has a batch norm that", "synchronized": "layer global has a batch norm that",
    "in_a_lambda": "layer hidden changes variables", "own_average": "layer average changes variables"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(name):
    with pytest.raises(UserError, match=f"^--model=tests.rigs.networks:{name}: .*{REFUSED[name]}"):
        network(name)
