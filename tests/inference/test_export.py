"""Each model of the zoo as a SavedModel and as ONNX, against the Keras model; what is written where."""
import dataclasses
import io
import json

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from conftest import DEEP
from PIL import Image

import model_zoo
from inference import export as exporting
from inference.export import export
from inference.trained import Trained, split_groups
from model_zoo import resnet
from model_zoo.layers import last_layer

pytestmark = pytest.mark.trainings

CLASSES = tuple(f"class é {number}" for number in range(7))
PIXELS = np.random.default_rng(1).integers(0, 256, (3, 67, 67, 3), dtype=np.uint8)
MODELS = [pytest.param(name, marks=[pytest.mark.campaign] if name in DEEP else [])
          for name in (*model_zoo.ZOO, "keras:MobileNetV3Small")]


def png(pixels) -> bytes:
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


@pytest.fixture
def narrow(monkeypatch):
    """Models with an eighth of the channels in residual networks, and at most 64 units in dense layers, for speed."""
    convolution, dense = resnet._Builder.convolution, tf.keras.layers.Dense

    def projection(self, x, channels, stride):
        same = stride == 1 and x.shape[-1] == channels // 8
        return x if same else self.norm(self.convolution(x, channels, 1, stride))

    def narrower(self, x, channels, *arguments):
        return convolution(self, x, channels // 8, *arguments)

    monkeypatch.setattr(resnet._Builder, "convolution", narrower)
    monkeypatch.setattr(resnet._Builder, "projection", projection)
    monkeypatch.setattr(tf.keras.layers, "Dense", lambda units, **options: dense(min(units, 64), **options))


def trained(name: str, size: int, classes=CLASSES) -> tuple[Trained, np.ndarray]:
    """A model whose layers all matter, and the probabilities of PIXELS, computed by Keras as in training."""
    model = model_zoo.create_model(name, len(classes), size, seed=3, mean=(120, 110, 100), std=(60, 50, 55))
    random, images = np.random.default_rng(2), PIXELS[:, :size, :size].astype(np.float32)
    for variable in model.variables:
        if "kernel" in variable.name:
            variable.assign(random.normal(0, (2 / np.prod(variable.shape[:-1])) ** 0.5, variable.shape))
        elif "moving_variance" in variable.name:
            variable.assign(random.uniform(0.5, 1.0, variable.shape))
        elif "batch_normalization" in variable.name:  # gammas start at zero
            variable.assign(random.uniform(0.2, 0.4, variable.shape))
    last, logits = last_layer(model), model(images, training=False).numpy()
    scale = 1 / np.ptp(logits, axis=0).max()  # the probabilities depend on the image
    if last.bias is None:  # which centres the logits
        scale = 1 / np.abs(logits).max()
    else:
        last.bias.assign((last.bias - logits.mean(axis=0)) * scale)
    last.kernel.assign(last.kernel * scale)
    logits = model(images, training=False).numpy().astype(np.float64)
    expected = np.exp(logits - logits.max(axis=1, keepdims=True))
    split_groups(model)
    return Trained(model, classes, size, 1.0, 4.0, "last"), expected / expected.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("name", MODELS)
def test_every_model(name, tmp_path, request):
    if name != "resnet20":  # is narrow, and its shortcuts know its channels
        request.getfixturevalue("narrow")
    size = 67 if name.startswith("alexnet") else 32
    model, expected = trained(name, size)
    printed = export(model, tmp_path)
    is_stock = name != "alexnet"  # Keras has no local response normalisation
    assert printed == {"saved_model": f"{tmp_path}/saved_model", "keras": f"{tmp_path}/model.h5" if is_stock else None,
                       "onnx": f"{tmp_path}/model.onnx", "classes": 7, "image_size": size, "epoch": 4.0,
                       "weights": "last"}
    assert {path.name for path in tmp_path.iterdir()} == {
        "saved_model", "model.onnx", "classes.txt", *(["model.h5"] if is_stock else [])}
    assert (tmp_path / "classes.txt").read_text().splitlines() == [*CLASSES]
    images = PIXELS[:, :size, :size]
    if is_stock:
        stock = tf.keras.models.load_model(tmp_path / "model.h5", compile=False)
        np.testing.assert_allclose(stock.predict(images, verbose=0), expected, rtol=1e-3, atol=1e-6)
    assert np.ptp(expected, axis=0).max() > 0.01  # it depends on the image

    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for batch in (images, images[:1]):
        [probabilities] = session.run(["probabilities"], {"images": batch})
        np.testing.assert_allclose(probabilities, expected[:len(batch)], rtol=1e-3, atol=1e-6)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == [*CLASSES]

    signatures = tf.saved_model.load(tmp_path / "saved_model").signatures
    encoded = tf.constant([png(pixels) for pixels in images])
    for signature, count in (("serving_default", 5), ("all_classes", 7)):
        result = signatures[signature](image_bytes=encoded)
        order = np.argsort(-expected, axis=1)[:, :count]
        np.testing.assert_allclose(result["probabilities"], np.take_along_axis(expected, order, 1), rtol=1e-3,
                                   atol=1e-6)
        ours = [[name.decode() for name in row] for row in result["classes"].numpy()]
        assert ours == [[CLASSES[label] for label in row] for row in order]


@pytest.mark.parametrize("enlarge", [1.14, None])
def test_onnx_takes_the_part_that_evaluation_takes_and_resizes_it(tmp_path, narrow, enlarge):
    """As inference/preprocessing.py, which test_preprocessing.py compares with DALI: pictures that shrink and grow."""
    model = dataclasses.replace(trained("convnet", 32)[0], enlarge=enlarge)
    export(model, tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    signature = tf.saved_model.load(tmp_path / "saved_model").signatures["all_classes"]
    for shape in ((90, 130), (31, 20), (32, 32)):
        images = np.random.default_rng(3).integers(0, 256, (2, *shape, 3), dtype=np.uint8)
        [probabilities] = session.run(["probabilities"], {"images": images})
        expected = signature(image_bytes=tf.constant([png(pixels) for pixels in images]))["probabilities"]
        np.testing.assert_allclose(np.sort(probabilities)[:, ::-1], expected, rtol=1e-3, atol=1e-5)
        assert np.ptp(probabilities, axis=0).max() > 1e-3  # they depend on the image


def test_views_are_in_the_graph(tmp_path, narrow, capfd):
    """In the SavedModel and in ONNX: softmax of the mean of the logits of the image and its mirror image."""
    model, _ = trained("convnet", 32)
    export(dataclasses.replace(model, views=2), tmp_path)
    assert "model.h5 predicts from the image alone" in capfd.readouterr().err
    images = PIXELS[:, :32, :32]
    logits = np.mean([model.model(one.astype(np.float32), training=False).numpy() for one in (
        images, np.flip(images, axis=2))], axis=0, dtype=np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    np.testing.assert_allclose(session.run(["probabilities"], {"images": images})[0], expected, rtol=1e-4)
    assert np.abs(expected - model.probabilities(images)).max() > 1e-3  # the mirror image matters
    signature = tf.saved_model.load(tmp_path / "saved_model").signatures["all_classes"]
    found = signature(image_bytes=tf.constant([png(pixels) for pixels in images]))["probabilities"]
    np.testing.assert_allclose(found, np.sort(expected)[:, ::-1], rtol=1e-4)


def test_another_export_replaces_the_first(tmp_path, narrow, monkeypatch, capfd):
    """Without tf2onnx, the file of the earlier model goes, too: it would not fit the SavedModel beside it."""
    export(trained("convnet", 32)[0], tmp_path)
    (tmp_path / "saved_model" / "leftover").touch()
    monkeypatch.setattr(exporting, "has_onnx", lambda: False)
    capfd.readouterr()
    printed = export(trained("convnet", 32, ("a", "b"))[0], tmp_path)
    assert printed["onnx"] is None and printed["classes"] == 2
    assert "uv run --extra onnx train.py" in capfd.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"saved_model", "model.h5", "classes.txt"}
    assert not (tmp_path / "saved_model" / "leftover").exists()
    result = tf.saved_model.load(tmp_path / "saved_model").signatures["serving_default"](
        image_bytes=tf.constant([png(PIXELS[0])]))
    assert result["classes"].shape == (1, 2)
