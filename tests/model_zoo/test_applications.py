"""The networks of tf.keras.applications with Bigbatch's layers, against Keras's own networks."""
import contextlib
import functools
import hashlib
import shutil
import sys
from types import SimpleNamespace

import h5py
import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from conftest import built, rows, train

import model_zoo
from common.command import USERS_KERAS_HOME
from common.errors import UserError
from distributed.world import World
from model_zoo import applications, weights
from model_zoo.layers import BatchNormalization, Dropout, last_layer, masks_at, norms
from plan.plan import Phase
from tests.rigs.trainings import differences
from training.batch_norm import ExactStatistics
from training.restoring import initialize

APPLICATIONS = tf.keras.applications
pytestmark = pytest.mark.xdist_group("networks")  # of conftest.built
# a network of each way to scale pixels and of each kind of layer that is replaced; sizes in pixels
SHOWN = {"MobileNetV3Small": 64, "ResNet50V2": 64, "VGG16": 32,
         "EfficientNetB0": pytest.param("EfficientNetB0", 32, marks=pytest.mark.trainings),
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
def test_a_network_computes_what_keras_computes(name, size, tmp_path):
    """With the weights that Keras's network has saved, as --pretrained_weights; the scaling of the pixels included."""
    theirs = randomized(name, size)
    theirs.save_weights(tmp_path / "theirs.h5")
    ours = model_zoo.create_model(f"keras:{name}", 7, size)
    before = last_layer(ours).get_weights()
    assert applications.load_pretrained(ours, tmp_path / "theirs.h5") == [last_layer(ours)]
    assert all((old == new).all() for old, new in zip(before, last_layer(ours).get_weights(), strict=True))
    last_layer(ours).set_weights(last_layer(theirs).get_weights())
    pixels = np.random.default_rng(1).uniform(0, 255, (2, size, size, 3)).astype(np.float32)
    scaled = sys.modules[getattr(APPLICATIONS, name).__module__].preprocess_input(pixels.copy())
    np.testing.assert_allclose(ours(pixels), theirs(scaled), rtol=1e-3, atol=2e-4)
    kinds = {type(layer) for layer in ours.layers}
    assert not kinds & {tf.keras.layers.BatchNormalization, tf.keras.layers.Dropout}
    assert model_zoo.MODELS[f"keras:{name}"].has_max_pooling == (tf.keras.layers.MaxPooling2D in kinds)


def test_at_another_size_the_dense_layer_that_depends_on_it_is_new(tmp_path, capfd):
    """VGG's `fc1`, with 512 inputs for each of the places that pooling leaves: 2 x 2 instead of 1 x 1."""
    theirs = randomized("VGG16", 32)
    ours = model_zoo.create_model("keras:VGG16", 7, 64)
    theirs.save(tmp_path / "whole.h5")
    before = ours.get_layer("fc1").get_weights()
    initialize(None, ours, classes=(), file=str(tmp_path / "whole.h5"))
    assert (f"pretrained_weights: took 28 of 32 variables from {tmp_path}/whole.h5; new: fc1, predictions"
            in capfd.readouterr().err)
    for name in ("block1_conv1", "block5_conv3", "fc2"):
        for own, source in zip(*(one.get_layer(name).get_weights() for one in (ours, theirs)), strict=True):
            assert (own == source).all()
    assert all((old == new).all() for old, new in zip(before, ours.get_layer("fc1").get_weights(), strict=True))


@pytest.mark.parametrize(("name", "size"), [("keras:MobileNet", 32), ("tests.rigs.networks:nested", 16), *(
    pytest.param(f"keras:{name}", size, marks=pytest.mark.campaign) for name, size in (  # each family with batch norm
        ("DenseNet121", 32), ("EfficientNetB0", 32), ("EfficientNetV2B0", 32), ("InceptionResNetV2", 75),
        ("InceptionV3", 75), ("MobileNetV2", 32), ("MobileNetV3Small", 32), ("NASNetMobile", 32), ("RegNetX002", 32),
        ("RegNetY002", 32), ("ResNet50", 32), ("ResNet50V2", 32), ("ResNetRS50", 32), ("Xception", 71)))])
def test_exact_statistics_are_those_of_what_each_batch_norm_gets(name, size):
    """Each layer tells what it gets when the model is called."""
    hvd.init()
    model, seen = model_zoo.create_model(name, 7, size), {}
    layers = norms(model)

    def told(layer, call, inputs, training):
        if tf.executing_eagerly():
            seen[layer.name] = inputs.numpy().astype(np.float64)
        return call(inputs, training)

    for layer in layers:
        layer.call = functools.partial(told, layer, layer.call)
    images = np.random.default_rng(0).uniform(0, 255, (16, size, size, 3)).astype(np.float32)
    with masks_at(model, tf.constant(0, tf.int64)):
        model(images, training=True)
    batches = SimpleNamespace(iterator=iter(tf.data.Dataset.from_tensors((images, np.zeros((16, 1))))),
                              admit=lambda count: None)
    train = SimpleNamespace(samples=16, any_order=False)
    feed = SimpleNamespace(dataset=SimpleNamespace(train=train), shard=0, shards=1, prepare=lambda *_, **__: None,
                           open=lambda _: contextlib.nullcontext(batches))
    ExactStatistics(model, World()).measure(feed, [0], Phase(0, 1, 16, 16, 1, 1, 16))
    assert len(seen) == len(layers) > 2
    for layer in layers:
        values = seen[layer.name].reshape(-1, seen[layer.name].shape[-1])
        mean, variance = values.mean(axis=0), values.var(axis=0)
        np.testing.assert_allclose(layer.moving_mean, mean, rtol=1e-2, atol=1e-3 * values.std())
        np.testing.assert_allclose(layer.moving_variance, variance, rtol=1e-2, atol=1e-3 * values.var())


@pytest.mark.parametrize("name", [name for name in model_zoo.MODELS if name.startswith("keras:")])
def test_the_least_image_size_is_the_one_of_keras(name):
    least = model_zoo.MODELS[name].least_image_size
    with pytest.raises(ValueError, match=rf"at least {least}x{least}"):
        getattr(APPLICATIONS, name.removeprefix("keras:"))(weights=None, input_shape=(least - 1, least - 1, 3))


def test_efficientnet_has_the_published_scaling():
    """The authors' code subtracts ImageNet's mean and divides by its deviation. Keras has both only with weights."""
    model = built("keras:EfficientNetB0", 7, 32)
    scaled = tf.keras.Model(model.inputs, next(
        layer for layer in model.layers if isinstance(layer, tf.keras.layers.Normalization)).get_output_at(-1))
    pixels = np.full((1, 32, 32, 3), 255, np.float32)
    np.testing.assert_allclose(scaled(pixels)[0, 0, 0], (1 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225],
                               rtol=1e-5)


@pytest.mark.trainings
def test_weights_and_masks_are_functions_of_the_seed():
    """Also stochastic depth, which drops whole samples."""
    images = tf.random.stateless_uniform([4, 32, 32, 3], [0, 1], 0, 255)
    models = [built("keras:EfficientNetB0", 7, 32),
              *(model_zoo.create_model("keras:EfficientNetB0", 7, 32, seed=seed) for seed in (0, 1))]
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


@pytest.mark.trainings
def test_weights_of_layers_in_layers_are_functions_of_the_seed():
    """Of ConvNeXt's stem and the three convolutions between its stages."""
    one, same, other = (model_zoo.create_model("keras:ConvNeXtTiny", 7, 32, seed=seed).variables for seed in (3, 3, 4))
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(one, same, strict=True))
    kernels = [(a.numpy() == b.numpy()).all() for a, b in zip(one, other, strict=True) if "kernel" in a.name]
    assert len(kernels) > 50 and not any(kernels)


def test_mixed_precision_ends_in_float32():
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = model_zoo.create_model("keras:MobileNetV3Small", 7, 32)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    assert model.output.dtype == tf.float32
    assert {layer.compute_dtype for layer in model.layers if isinstance(layer, BatchNormalization)} == {"bfloat16"}


def test_weights_without_the_last_layers(tmp_path):
    """MobileNetV3 has two layers with weights after the pooling: a convolution, and the one that makes the logits."""
    theirs = APPLICATIONS.MobileNetV3Small(weights=None, include_top=False, input_shape=(32, 32, 3))
    for variable in theirs.variables:
        variable.assign(np.random.default_rng(0).uniform(0.5, 1, variable.shape))
    theirs.save_weights(tmp_path / "body.h5")
    ours = model_zoo.create_model("keras:MobileNetV3Small", 7, 32)
    new = applications.load_pretrained(ours, tmp_path / "body.h5")
    assert [layer.name for layer in new] == ["Conv_2", "Logits"]
    for variable, own in zip(theirs.variables, ours.variables, strict=False):
        assert (variable.numpy() == own.numpy()).all()


def test_damaged_values_are_noticed(tmp_path, capsys):
    """One value that is not finite is enough. Of zeros, of which a bias may have many, it takes a whole kernel."""
    theirs = APPLICATIONS.MobileNetV3Small(weights=None, include_top=False, input_shape=(32, 32, 3))
    theirs.save_weights(tmp_path / "w.h5")
    ours, before = model_zoo.create_model("keras:MobileNetV3Small", 7, 32), (tmp_path / "w.h5").read_bytes()
    for value, message in ((np.nan, "is damaged: {} has infinite or NaN values; copy or download it again"),
                           (-np.inf, "is damaged: {} has infinite or NaN values; copy or download it again"),
                           (0.0, "may be damaged: all values of {} are 0")):
        (tmp_path / "w.h5").write_bytes(before)
        with h5py.File(tmp_path / "w.h5", "r+") as file:
            file["Conv/Conv/kernel:0"][(2, 1, 0, 4) if value else ...] = value
        expected = f"{tmp_path}/w.h5 {message.format('Conv/kernel:0')}"
        with pytest.raises(UserError, match=f"^{expected}$") if value else contextlib.nullcontext():
            applications.load_pretrained(ours, tmp_path / "w.h5")
        assert capsys.readouterr().err.count(f"warning: {expected}\n") == (not value)


def test_a_damaged_header_is_one_line(tmp_path):
    """h5py raises RuntimeError for some in a file that it can open, such as for an unknown version of an attribute."""
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file.attrs["layer_names"] = [b"a"]
        file.create_group("a").attrs["weight_names"] = [b"k"]
        file["a/k"] = np.ones(3)
    content = bytearray((tmp_path / "w.h5").read_bytes())
    content[content.find(b"layer_names") - 8] ^= 4
    (tmp_path / "w.h5").write_bytes(content)
    with pytest.raises(UserError, match=r"w\.h5 is damaged: Can't.*; copy or download it again$"):
        applications.load_pretrained(tf.keras.Sequential(name="keras-VGG16"), tmp_path / "w.h5")


@pytest.mark.parametrize(("name", "message"), [
    ("MobileNetV2", r"w.h5 has the weights of another network than keras:VGG16: Conv1 .* instead of block1_conv1 \["),
    ("VGG19", "w.h5 has the weights of another network than keras:VGG16: block3_conv4")])
def test_files_of_other_networks_are_refused(name, message, tmp_path):
    path = tmp_path / "w.h5"
    getattr(APPLICATIONS, name)(weights=None, input_shape=(32, 32, 3), classes=7).save_weights(path)
    with pytest.raises(UserError, match=message):
        applications.load_pretrained(built("keras:VGG16", 7, 32), path)


def test_a_download_goes_to_keras_home_and_its_error_says_where_to_copy_the_file(monkeypatch, tmp_path):
    """A proxy that nobody is behind stands for no network. A file in the folder needs none, if it has Keras's sum."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv(USERS_KERAS_HOME, str(tmp_path))
    source = weights.source_of("keras:MobileNetV3Small")
    file = tmp_path / "models" / "weights_mobilenet_v3_small_224_1.0_float.h5"
    assert source["origin"].startswith("https://") and source["origin"].endswith(f"/{file.name}")
    with pytest.raises(UserError) as error:
        applications.load_pretrained(tf.keras.Sequential(name="keras-MobileNetV3Small"))
    for words in (source["origin"], f"save it as {file}", "--pretrained_weights=FILE"):
        assert words in str(error.value)
    model_zoo.create_model("keras:MobileNetV3Small", 1000, 32).save_weights(file)
    monkeypatch.setattr(weights, "source_of", lambda name: source | {
        "file_hash": hashlib.md5(file.read_bytes()).hexdigest()})
    assert len(applications.load_pretrained(model_zoo.create_model("keras:MobileNetV3Small", 7, 32))) == 1


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
