"""The networks of tf.keras.applications with Bigbatch's layers, against Keras's own networks."""
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf
from conftest import rows, train

import model_zoo
from common.errors import UserError
from model_zoo import applications
from model_zoo.layers import BatchNormalization, Dropout, last_layer, masks_at
from tests.rigs.trainings import differences

APPLICATIONS = tf.keras.applications
# a network of each way to scale pixels and of each kind of layer that is replaced; sizes in pixels
SHOWN = {"MobileNetV3Small": 64, "ResNet50V2": 64, "EfficientNetB0": 32, "VGG16": 32,
         **{name: pytest.param(name, 75, marks=pytest.mark.campaign)
            for name in ("InceptionV3", "DenseNet121", "EfficientNetV2B0", "NASNetMobile", "RegNetY002", "Xception",
                         "ConvNeXtTiny", "MobileNetV2", "ResNetRS50")}}


def test_the_names_are_those_of_keras():
    names = {name for name in dir(APPLICATIONS) if name[0].isupper()}
    assert {name.removeprefix("keras:") for name in model_zoo.MODELS if name.startswith("keras:")} == names


@pytest.mark.parametrize("name", ["EfficientNetV2B1", "InceptionV3"])
def test_the_default_size_is_the_one_of_keras(name):
    assert getattr(APPLICATIONS, name)(weights=None).input_shape[1] == model_zoo.MODELS[f"keras:{name}"].image_size


def randomized(name, size):
    """Returns Keras's own network, with weights that show which layer has which."""
    network = getattr(APPLICATIONS, name)(weights=None, classes=7, classifier_activation=None,
                                          input_shape=(size, size, 3))
    random = np.random.default_rng(0)
    for variable in network.variables:
        if "moving_variance" in variable.name:
            variable.assign(random.uniform(0.5, 2, variable.shape))
        elif len(variable.shape) == 1 and variable.dtype == tf.float32:
            variable.assign(variable + random.normal(size=variable.shape) * 0.1)
    return network


@pytest.mark.parametrize(("name", "size"), [one if isinstance(one, type(pytest.param())) else (name, one)
                                            for name, one in SHOWN.items()])
def test_a_network_computes_what_keras_computes(name, size, monkeypatch):
    """With the weights of another process, as --pretrained loads them; the scaling of the pixels included."""
    theirs = randomized(name, size)
    ours = model_zoo.create_model(f"keras:{name}", 7, size)
    monkeypatch.setattr(applications, "_builder", lambda _: lambda weights: theirs)
    before = last_layer(ours).get_weights()
    assert applications.load_pretrained(ours) == len(ours.variables) - 2
    assert all((old == new).all() for old, new in zip(before, last_layer(ours).get_weights(), strict=True))
    last_layer(ours).set_weights(last_layer(theirs).get_weights())
    pixels = np.random.default_rng(1).uniform(0, 255, (2, size, size, 3)).astype(np.float32)
    scaled = sys.modules[getattr(APPLICATIONS, name).__module__].preprocess_input(pixels.copy())
    np.testing.assert_allclose(ours(pixels), theirs(scaled), rtol=1e-3, atol=2e-4)
    assert not [layer for layer in ours.layers if type(layer) in (
        tf.keras.layers.BatchNormalization, tf.keras.layers.Dropout)]


def test_efficientnet_has_the_published_scaling():
    """The authors' code subtracts ImageNet's mean and divides by its deviation. Keras has both only with weights."""
    model = model_zoo.create_model("keras:EfficientNetB0", 7, 32)
    scaled = tf.keras.Model(model.inputs, next(
        layer for layer in model.layers if isinstance(layer, tf.keras.layers.Normalization)).get_output_at(-1))
    pixels = np.full((1, 32, 32, 3), 255, np.float32)
    np.testing.assert_allclose(scaled(pixels)[0, 0, 0], (1 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225],
                               rtol=1e-5)


def test_weights_and_masks_are_functions_of_the_seed():
    """Also stochastic depth, which drops whole samples."""
    images = tf.random.stateless_uniform([4, 32, 32, 3], [0, 1], 0, 255)
    models = [model_zoo.create_model("keras:EfficientNetB0", 7, 32, seed=seed) for seed in (0, 0, 1)]
    outputs = []
    for model in models:
        with masks_at(model, tf.constant(3, tf.int64)):
            outputs.append(model(images, training=True).numpy())
    assert (outputs[0] == outputs[1]).all() and (outputs[0] != outputs[2]).any()
    [depth, *_] = [layer for layer in models[0].layers if isinstance(layer, Dropout)]
    kept = []
    for position in range(64):
        depth.position = tf.constant(position, tf.int64)
        one = depth(tf.ones([2, 3, 3, 5]), training=True).numpy()
        assert all(len(np.unique(sample)) == 1 for sample in one)
        kept.append(one[:, 0, 0, 0])
    assert (np.array(kept)[1:, 0] == np.array(kept)[:-1, 1]).all()  # by position, not by batch
    assert {0.0} < set(np.unique(np.array(kept)).tolist())


def test_mixed_precision_ends_in_float32():
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = model_zoo.create_model("keras:MobileNetV3Small", 7, 32)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    assert model.output.dtype == tf.float32
    assert {layer.compute_dtype for layer in model.layers if isinstance(layer, BatchNormalization)} == {"bfloat16"}


def test_without_a_network_an_error_says_what_to_do(monkeypatch, tmp_path):
    def unreachable(**_):
        raise Exception("URL fetch failure on https://storage.example/weights.h5: None -- unreachable")

    monkeypatch.setattr(applications, "_builder", lambda _: unreachable)
    with pytest.raises(UserError, match=r"--pretrained: Keras cannot load the weights: URL fetch failure .* download"):
        applications.load_pretrained(tf.keras.Sequential(name="keras-VGG16"))


@pytest.mark.trainings
def test_a_network_of_keras_is_trained_and_resumed_to_the_bit(tmp_path):
    """On two workers, with dropout, AdamW and common statistics. One goes on from the first epoch's checkpoint."""
    flags = ("--model=keras:MobileNetV3Small", "--image_size=32", "--optimizer=adamw", "--learning_rate=0.001",
             "--weight_decay=0.01", "--exclude=gamma,beta,bias", "--batch_size=240", "--micro_batch_size=60",
             "--batch_norm_span=60", "--deterministic", "--warmup=none", "--augmentation=none", "--epochs=2")
    train(*flags, "--checkpoint_every=1", f"--output_dir={tmp_path}/one", kind="mpirun", workers=2)
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True)
    shutil.rmtree(max((tmp_path / "two" / "checkpoints").glob("step-*")))
    resumed = train(*flags, f"--output_dir={tmp_path}/two").stderr
    assert "epoch 2/2" in resumed and "epoch 1/2" not in resumed
    assert not differences(tmp_path / "one", tmp_path / "two")
    assert len(rows(tmp_path / "two")) == 2
