"""What a SavedModel gives out for a class whose name is not UTF-8."""
import os

import tensorflow as tf

from inference.export import write_saved_model
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
