"""What a SavedModel gives out for a class whose name is not UTF-8, and what an export that fails leaves."""
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from conftest import SmallDisk, environment

from common.errors import UserError
from inference import export as exporting
from inference.export import export, write_saved_model
from inference.trained import Trained
from tests.rigs.pictures import encode, picture

NAMES = (b"dog", b"ch\xe2t", "épée".encode())


def test_class_names_are_the_bytes_of_the_folders(tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Input((8, 8, 3)), tf.keras.layers.GlobalAveragePooling2D(),
                                 tf.keras.layers.Dense(3)])
    write_saved_model(Trained(model, tuple(map(os.fsdecode, NAMES)), 8, 1.0, 0.0, "last"), tmp_path / "saved_model")
    classify = tf.saved_model.load(tmp_path / "saved_model").signatures["all_classes"]
    [names] = classify(image_bytes=tf.constant([encode(picture(1))]))["classes"].numpy()
    assert {*names} == {*NAMES}


@pytest.mark.trainings  # a cold start of TensorFlow, whose messages the other tests hide
def test_tensorflow_prints_nothing_where_it_is_used(tmp_path):
    """After its import. A notebook shows standard error in red."""
    model = tf.keras.Sequential([tf.keras.layers.Input((8, 8, 3)), tf.keras.layers.GlobalAveragePooling2D(),
                                 tf.keras.layers.Dense(3)])
    write_saved_model(Trained(model, tuple("abc"), 8, 1.0, 0.0, "last"), tmp_path / "saved_model")
    for kind in ("JPEG", "PNG", "GIF"):
        (tmp_path / kind).write_bytes(encode(picture(1), kind))
    program = ("import pathlib, sys, tensorflow as tf; print('imported', file=sys.stderr, flush=True)\n"
               "predict = tf.saved_model.load('saved_model').signatures['serving_default']\n"
               "images = [pathlib.Path(kind).read_bytes() for kind in ('JPEG', 'PNG', 'GIF')]\n"
               "print(predict(image_bytes=tf.constant(images))['classes'].shape)\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment() | {
        "TF_CPP_MIN_LOG_LEVEL": "0"}, text=True, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr.partition("imported\n")[2]) == (0, "(3, 3)\n", ""), done.stderr


@pytest.fixture(scope="module")
def normed(tmp_path_factory):
    """A signature, and the model and its pixels' size: with batch norm, whose kernel fails on a batch of no images."""
    folder = tmp_path_factory.mktemp("normed") / "saved_model"
    model = tf.keras.Sequential([tf.keras.layers.Input((8, 8, 3)), tf.keras.layers.Conv2D(4, 3),
                                 tf.keras.layers.BatchNormalization(), tf.keras.layers.GlobalAveragePooling2D(),
                                 tf.keras.layers.Dense(3)])
    model.layers[-1].kernel.assign(model.layers[-1].kernel / 100)
    write_saved_model(Trained(model, ("a", "b", "c"), 8, 1.0, 0.0, "last"), folder)
    return tf.saved_model.load(folder).signatures["all_classes"]


def test_a_batch_without_images_has_no_classes(normed):
    result = normed(image_bytes=tf.constant([], tf.string))
    assert {name: tuple(value.shape) for name, value in result.items()} == {"classes": (0, 3), "probabilities": (0, 3)}


def test_a_batch_is_what_its_images_are(normed):
    """In their order, however many are decoded at a time."""
    images = [encode(picture(number)) for number in range(40)]
    together = normed(image_bytes=tf.constant(images))["probabilities"].numpy()
    alone = [normed(image_bytes=tf.constant([image]))["probabilities"][0].numpy() for image in images]
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    assert len({round(float(row[0]), 6) for row in alone}) > 20


@pytest.mark.parametrize("broken", [[1], [0], [0, 1], [2, 4]])
def test_broken_images_of_a_batch_are_named(normed, broken):
    image = encode(picture(1))
    kinds = [image[:-60], b"", b"version https://git-lfs.github.com/spec/v1\n", b"GIF89a", b"\x89PNG"]
    batch = [kinds[index] if index in broken else image for index in range(max(broken) + 1)]
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        normed(image_bytes=tf.constant(batch))
    assert ("these images of the batch, counted from 0, cannot be decoded as JPEG, PNG or GIF:] "
            f"[{' '.join(map(str, broken))}]") in str(error.value)


def test_an_export_that_fails_leaves_the_earlier_one(monkeypatch):
    """The disk has room for one and a half. Both a folder and files would be replaced, and model.tflite would go."""
    monkeypatch.setattr(exporting, "has_onnx", lambda: False)
    model = tf.keras.Sequential([tf.keras.layers.Input((8, 8, 3)), tf.keras.layers.Flatten(),
                                 tf.keras.layers.Dense(300), tf.keras.layers.Dense(3)])
    trained = [Trained(model, tuple(names), 8, 1.0, 0.0, "last") for names in ("abc", "xyz")]

    def content(folder):
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    with SmallDisk("size=16m") as disk:
        export(trained[0], disk.path / "exported")
        (disk.path / "exported" / "model.tflite").write_text("earlier")
        before = content(disk.path / "exported")
        disk.remount(f"size={3 * sum(map(len, before.values())) // 2}")
        with pytest.raises(UserError, match=r"cannot be written: .*[Nn]o space left"):
            export(trained[1], disk.path / "exported")
        assert content(disk.path / "exported") == before
        disk.remount("size=16m")
        export(trained[1], disk.path / "exported")
        assert (disk.path / "exported" / "classes.txt").read_text() == "x\ny\nz\n"
        assert {path.name for path in (disk.path / "exported").iterdir()} == {"saved_model", "model.h5", "classes.txt"}
