"""model.h5 and model.tflite, opened in processes without this package, against the probabilities of the network."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from conftest import skip, train

import model_zoo
from inference.export import write_tflite
from inference.keras_file import NotWritten, stock_model, write_keras
from inference.trained import Trained, split_groups
from model_zoo.applications import load_pretrained
from model_zoo.layers import last_layer, norms

# Prints the largest difference from the expected probabilities, and trains for a step.
READER = """
import sys
import numpy as np
import keras
file, pixels, expected = sys.argv[1:]
model, pixels = keras.models.load_model(file, compile=False), np.load(pixels)
difference = np.abs(model.predict(pixels, verbose=0) - np.load(expected)).max()
before = model.get_weights()
model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
model.fit(pixels, np.zeros(len(pixels)), verbose=0)
assert any((old != new).any() for old, new in zip(before, model.get_weights()))
assert not {"model_zoo", "inference"} & {*sys.modules}
print(keras.__version__[0], difference)
"""
# Each kind of layer that is replaced: norms, dropout, shortcuts, groups, the scaling of pixels; sizes in pixels.
NETWORKS = {"resnet20": 32, "resnet10_narrow": 64, "alexnet_bn": 67, "whitened_convnet": 32,
            "keras:MobileNetV3Small": 32,
            **{name: pytest.param(name, size, marks=pytest.mark.campaign) for name, size in {
                "convnet_bn": 32, "resnet50": 64, "keras:MobileNet": 32, "keras:ResNet50": 32, "keras:ResNet50V2": 32,
                "keras:DenseNet121": 32, "keras:EfficientNetB0": 32, "keras:EfficientNetV2B0": 32,
                "keras:ConvNeXtTiny": 32, "keras:InceptionResNetV2": 75, "keras:InceptionV3": 75,
                "keras:NASNetMobile": 32, "keras:RegNetX002": 32, "keras:RegNetY002": 32, "keras:ResNetRS50": 32,
                "keras:VGG16": 32, "keras:Xception": 71, "keras:MobileNetV2": 32}.items()}}
PARAMETERS = [one if isinstance(one, type(pytest.param())) else (name, one) for name, one in NETWORKS.items()]


def made(name: str, size: int) -> tuple[Trained, np.ndarray, np.ndarray]:
    """A network whose variables all matter, pixels, and their probabilities as evaluation computes them.

    Random weights alone give every image the same probabilities. So the moving statistics are those of the images, and
    the last layer is scaled.
    """
    more = {"drop_path": 0.2} if name == "resnet10_narrow" else {}
    model = model_zoo.create_model(name, 5, size, seed=3, mean=(120, 110, 100), std=(60, 50, 55), **more)
    random = np.random.default_rng(0)
    pixels = np.uint8(random.uniform(0, 255, (8, size, size, 3)) * random.uniform(0.1, 1, (8, 1, 1, 3)))
    for variable in model.variables:
        if len(variable.shape) == 1 and variable.dtype == tf.float32:
            variable.assign(variable + random.normal(0, 0.1, variable.shape))
    for norm in norms(model):
        norm.momentum = 0.0
    model(pixels.astype(np.float32), training=True)
    last, logits = last_layer(model), model(pixels.astype(np.float32), training=False).numpy()
    scale = 1 / np.ptp(logits, axis=0).max()
    last.set_weights([last.kernel * scale, *([(last.bias - logits.mean(axis=0)) * scale] if last.use_bias else [])])
    expected = tf.nn.softmax(model(pixels.astype(np.float32), training=False)).numpy()
    assert np.ptp(expected, axis=0).max() > 0.05  # between images
    split_groups(model)
    return Trained(model, tuple("abcde"), size, 1.0, 0.0, "last"), pixels, expected


def read(python, file: Path, pixels, expected) -> tuple[str, float]:
    """What READER prints with another Python: the version of Keras, and the difference."""
    np.save(file.with_suffix(".pixels.npy"), pixels.astype(np.float32))
    np.save(file.with_suffix(".expected.npy"), expected)
    done = subprocess.run([python, "-c", READER, file, file.with_suffix(".pixels.npy"),
                           file.with_suffix(".expected.npy")], cwd=file.parent, capture_output=True, text=True,
                          env={"PATH": "", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND":
                               "tensorflow", "HOME": str(file.parent)})
    assert done.returncode == 0, done.stderr
    version, difference = done.stdout.split()[-2:]
    return version, float(difference)


@pytest.fixture(scope="module")
def keras3(tmp_path_factory) -> Path:
    """A Python with today's Keras, in an environment of its own."""
    folder = tmp_path_factory.mktemp("keras3")
    for command in (["uv", "venv", "--quiet", "--python", sys.executable, folder],
                    ["uv", "pip", "install", "--quiet", "--python", folder / "bin/python", "keras>=3.15,<4",
                     "tensorflow-cpu>=2.21"]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            skip(f"needs Keras 3: {done.stderr[-300:]}")
    return folder / "bin/python"


@pytest.mark.trainings
@pytest.mark.parametrize(("name", "size"), [PARAMETERS[0]])
def test_keras_2_opens_the_file_without_this_package(name, size, tmp_path):
    trained, pixels, expected = made(name, size)
    write_keras(trained, tmp_path / "model.h5")
    version, difference = read(sys.executable, tmp_path / "model.h5", pixels, expected)
    assert version == "2" and difference < 1e-5


FAMILIES = [*(pytest.param(name, size, marks=pytest.mark.trainings) for name, size in (
    ("MobileNetV3Small", 32), ("ResNet50", 32), ("VGG16", 32), ("ConvNeXtTiny", 32))), *(
    pytest.param(name, size, marks=pytest.mark.campaign) for name, size in (
        ("ResNet50V2", 32), ("DenseNet121", 32), ("EfficientNetB0", 32), ("EfficientNetV2B0", 32), ("InceptionV3", 75),
        ("InceptionResNetV2", 75), ("MobileNet", 32), ("MobileNetV2", 32), ("NASNetMobile", 32), ("RegNetX002", 32),
        ("RegNetY002", 32), ("ResNetRS50", 32), ("Xception", 71)))]


@pytest.mark.parametrize(("name", "size"), FAMILIES)
def test_a_network_starts_from_the_file(name, size, tmp_path):
    """What the new network computes with the exported weights, except the last layer's, is what the first computed."""
    trained, pixels, expected = made(f"keras:{name}", size)
    write_keras(trained, tmp_path / "model.h5")
    ours = model_zoo.create_model(f"keras:{name}", 5, size, seed=4)
    assert load_pretrained(ours, tmp_path / "model.h5") == [last_layer(ours)]
    last_layer(ours).set_weights(last_layer(trained.model).get_weights())
    np.testing.assert_allclose(tf.nn.softmax(ours(pixels.astype(np.float32))), expected, atol=3e-5)


@pytest.mark.trainings
def test_a_training_starts_from_the_file(digits, tmp_path):
    trained, *_ = made("keras:MobileNetV3Small", 32)
    write_keras(trained, tmp_path / "model.h5")
    done = train(f"--data_dir={digits}", "--model=keras:MobileNetV3Small", "--image_size=32", "--epochs=0.02",
                 "--batch_size=16", f"--pretrained_weights={tmp_path}/model.h5", f"--output_dir={tmp_path}/run")
    count, new = len(trained.model.variables), last_layer(trained.model)
    assert (f"pretrained_weights: took {count - len(new.weights)} of {count} variables from {tmp_path}/model.h5; "
            f"new: {new.name}\n" in done.stderr)


@pytest.mark.docs
@pytest.mark.parametrize(("name", "size"), PARAMETERS)
def test_keras_2_and_keras_3_open_every_kind(name, size, tmp_path, keras3):
    trained, pixels, expected = made(name, size)
    write_keras(trained, tmp_path / "model.h5")
    for python, major in ((sys.executable, "2"), (keras3, "3")):
        version, difference = read(python, tmp_path / "model.h5", pixels, expected)
        assert version == major and difference < 3e-5


def test_a_layer_that_keras_lacks_is_named(tmp_path):
    """Local response normalisation, of AlexNet."""
    with pytest.raises(NotWritten, match="Keras has no layer like local_response_normalization"):
        write_keras(made("alexnet", 67)[0], tmp_path / "model.h5")
    assert not [*tmp_path.iterdir()]


class Subclassed(tf.keras.Model):
    """A user's model, whose calls of layers Keras does not record."""

    def call(self, inputs):
        return inputs


class Twice(tf.keras.layers.Layer):
    """A user's layer without a configuration."""

    def __init__(self, factor):
        super().__init__(name="twice")
        self.factor = factor

    def call(self, inputs):
        return self.factor * inputs


@pytest.mark.parametrize(("compute", "name"), [
    (lambda x, y: x - y, "tf.math.subtract"), (lambda x, y: 1 - x, "tf.math.subtract"), (lambda x, y: x[:, 1:], "tf."),
    (lambda x, y: tf.concat([x, y], -1), "tf.concat"), (lambda x, y: tf.nn.elu(x), "tf.nn.elu"),
    (lambda x, y: Twice(2)(x), "twice"), (lambda x, y: Subclassed(name="own")(x), "own")])
def test_what_keras_has_no_layer_for_is_named(compute, name):
    x = tf.keras.Input((4, 4, 3))
    with pytest.raises(NotWritten, match=f"Keras has no layer like {name}"):
        stock_model(tf.keras.Model(x, compute(x, tf.keras.layers.ReLU()(x))))


@pytest.mark.parametrize(("name", "size"), [("tests.rigs.networks:nested", 16), ("examples.own_network:network", 16)])
def test_models_in_models_are_copied(name, size):
    trained, pixels, expected = made(name, size)
    copy = stock_model(trained.model)
    np.testing.assert_allclose(tf.nn.softmax(copy(pixels.astype(np.float32))), expected, atol=1e-6)
    assert all(type(layer).__module__.startswith("keras.") for layer in copy._flatten_layers())


@pytest.mark.trainings
@pytest.mark.parametrize(("name", "size"), [
    ("resnet20", 32), ("alexnet", 67), ("whitened_convnet", 32), ("keras:MobileNetV3Small", 32)])
def test_tflite(name, size, tmp_path):
    """In its interpreter, for one image and several. Weights of 8 bits make a smaller file, and similar outputs."""
    trained, pixels, expected = made(name, size)
    sizes = {}
    for kind, tolerance in (("true", 1e-4), ("dynamic_range", 0.15)):  # AlexNet: 0.125
        path = tmp_path / f"{kind}.tflite"
        write_tflite(trained, path, kind)
        sizes[kind] = path.stat().st_size
        for count in (1, len(pixels)):
            interpreter = tf.lite.Interpreter(str(path))
            [given], [result] = interpreter.get_input_details(), interpreter.get_output_details()
            interpreter.resize_tensor_input(given["index"], [count, size, size, 3])
            interpreter.allocate_tensors()
            interpreter.set_tensor(given["index"], pixels[:count])
            interpreter.invoke()
            np.testing.assert_allclose(interpreter.get_tensor(result["index"]), expected[:count], atol=tolerance)
    assert sizes["dynamic_range"] < 0.4 * sizes["true"]
