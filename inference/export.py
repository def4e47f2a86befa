"""Exports a trained model (--mode=export): a SavedModel, a file for Keras, one for ONNX and, if wanted, for TFLite."""
import functools
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path

import tensorflow as tf
from tensorflow.lite.python.convert_phase import ConverterError

from common import streams
from common.errors import UserError, complain, one_line, reason
from common.files import remove, replace, scratch_folder, write_atomically
from inference.keras_file import NotWritten, write_keras
from inference.preprocessing import central_part, preprocess, resized
from inference.trained import TOP, Trained
from model_zoo.layers import input_numbers

IMAGES = tf.TensorSpec([None], tf.string, "image_bytes")
PARALLEL = 16  # images that a SavedModel decodes at a time, at most
INPUT = "images"
OUTPUT = "probabilities"
OPSET = 17  # of 2022; most runtimes have it
MISSING = "tf2onnx is not installed; run the same command with `uv run --extra onnx train.py`"


def export(trained: Trained, folder: Path, tflite: str = "false") -> dict:
    """Writes saved_model, model.h5, model.onnx and classes.txt into a folder. Returns what to print.

    tflite: the flag, with which it also writes model.tflite. What cannot be written is left out, and a line says why:
    model.onnx without the packages of the extra `onnx`, model.h5 with layers that are not Keras's. An earlier export in
    the folder stays until all is written. Raises UserError.
    """
    writers = {"saved_model": write_saved_model, "classes.txt": write_classes, "model.h5": write_keras,
               "model.onnx": write_onnx, "model.tflite": functools.partial(write_tflite, tflite=tflite)}
    kinds = {"saved_model": "saved_model", "keras": "model.h5", "onnx": "model.onnx"}
    kinds |= {"tflite": "model.tflite"} if tflite != "false" else {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch_folder(folder) as scratch:
            for name in ("classes.txt", *kinds.values()):
                try:
                    writers[name](trained, scratch / name)
                except NotWritten as problem:
                    complain(f"{name} is not written, because {problem}")
            for name in writers:  # nothing of an earlier export stays, which has other weights
                replace(scratch / name, folder / name) if (scratch / name).exists() else remove(folder / name)
    except tf.errors.OpError as error:
        raise UserError(f"--output_dir: {folder} cannot be written: {reason(error)}") from None
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be written: {error.strerror or error}") from None
    written = {kind: str(folder / name) if (folder / name).exists() else None for kind, name in kinds.items()}
    for kind, path in written.items():
        if path:
            print(f"{kind.replace('_', ' ')}: {path}", file=sys.stderr)
    if trained.views > 1 and written["keras"]:
        complain(f"model.h5 predicts from the image alone; the other files average {trained.views} views of it")
    return written | {"classes": len(trained.classes), "image_size": trained.image_size, "epoch": trained.epoch,
                      "weights": trained.weights}


def write_classes(trained: Trained, path: Path) -> None:
    """Writes the names of the classes in label order, one per line. Raises OSError."""
    write_atomically(path, "".join(f"{name}\n" for name in trained.classes).encode(errors="surrogateescape"))


class Classifier(tf.Module):
    """The module in the SavedModel. Its functions take encoded images, string (batch,): JPEG, PNG or GIF.

    They return `classes` (names, string) and `probabilities` (float32), both (batch, classes), the most probable class
    first.
    """

    def __init__(self, trained: Trained):
        super().__init__()
        self._probabilities = trained.probabilities
        # TensorFlow only saves what the functions use if it is an attribute.
        self.weights = [*trained.model.variables, *input_numbers(trained.model)]
        self._size = trained.image_size
        self._enlarge = trained.enlarge
        self._names = [name.encode(errors="surrogateescape") for name in trained.classes]

    @tf.function(input_signature=[IMAGES], autograph=False)
    def classify(self, image_bytes):
        """Returns the five most probable classes."""
        return self._most_probable(image_bytes, min(TOP, len(self._names)))

    @tf.function(input_signature=[IMAGES], autograph=False)
    def classify_all(self, image_bytes):
        """Returns all classes."""
        return self._most_probable(image_bytes, len(self._names))

    def _most_probable(self, image_bytes, count):
        number = tf.size(image_bytes)
        images = self._decoded(image_bytes)[:tf.maximum(number, 1)]
        probabilities, labels = tf.math.top_k(self._probabilities(images)[:number], count)
        return {"classes": tf.gather(tf.constant(self._names), labels), "probabilities": probabilities}

    def _decoded(self, image_bytes):
        """Returns the pixels of a batch of images, and a black image after them: some networks need at least one."""
        number = tf.size(image_bytes, tf.int64)
        read = tf.data.Dataset.range(number).map(
            lambda index: (index, preprocess(image_bytes[index], self._size, self._enlarge)), PARALLEL).ignore_errors()
        black = tf.data.Dataset.from_tensors((number, tf.zeros((self._size, self._size, 3), tf.uint8)))
        indices, images = read.concatenate(black).batch(number + 1).get_single_element()
        broken = tf.raw_ops.ListDiff(x=tf.range(number), y=indices).out
        with tf.control_dependencies([tf.debugging.Assert(tf.size(broken) == 0, [
                "these images of the batch, counted from 0, cannot be decoded as JPEG, PNG or GIF:", broken])]):
            return tf.identity(images)


def write_saved_model(trained: Trained, path: Path) -> None:
    """Writes a SavedModel folder. Raises OSError, tf.errors.OpError."""
    classifier = Classifier(trained)
    tf.saved_model.save(classifier, str(path), {
        "serving_default": classifier.classify, "all_classes": classifier.classify_all})


def write_tflite(trained: Trained, path: Path, tflite: str) -> None:
    """Writes a TFLite file atomically. Raises OSError, and NotWritten for an operation that TFLite lacks.

    Input: pixels, uint8 (batch, image_size, image_size, 3), RGB. Output: probabilities, float32 (batch, classes), in
    label order. tflite: the flag: dynamic_range for weights of 8 bits.
    """
    call = trained.probabilities.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([call], trained.model)
    converter.optimizations = [tf.lite.Optimize.DEFAULT] if tflite == "dynamic_range" else []
    try:
        with streams.silent():
            content = converter.convert()  # whose compiler prints statistics
    except ConverterError as error:
        raise NotWritten(f"TFLite cannot compute it: {one_line(error)[:200]}") from None
    write_atomically(path, content)


def has_onnx() -> bool:
    """Whether the packages of the extra `onnx` are installed."""
    return all(importlib.util.find_spec(name) for name in ("onnx", "tf2onnx"))


def write_onnx(trained: Trained, path: Path) -> None:
    """Writes an ONNX file atomically. Raises OSError, and NotWritten without the packages of the extra `onnx`.

    Input `images`: uint8 (batch, height, width, 3), RGB, upright, of any size. The model crops and resizes them as
    evaluation does. Output `probabilities`: float32 (batch, classes), in label order. Metadata: `classes` (a JSON list
    of names) and `image_size` (of the network's input).
    """
    if not has_onnx():
        raise NotWritten(MISSING)
    write_atomically(path, converted(trained).SerializeToString())


def converted(trained: Trained):
    """Returns the onnx.ModelProto."""
    os.environ["TF2ONNX_CATCH_ERRORS"] = "FALSE"  # halves the time: no copies for its fallback
    import onnx
    import tf2onnx
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    for name in ("tf2onnx", "tensorflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    @tf.function(input_signature=[tf.TensorSpec([None, None, None, 3], tf.uint8, INPUT)], autograph=False)
    def whole(images):
        return trained.probabilities(resized(central_part(images, trained.enlarge), trained.image_size))

    frozen = convert_variables_to_constants_v2(whole.get_concrete_function(), lower_control_flow=False)
    [given], [result] = frozen.inputs, frozen.outputs
    graph = frozen.graph.as_graph_def()
    _make_added_scalars_vectors(graph, f"{trained.model.name}/")
    model, _ = tf2onnx.convert.from_graph_def(
        graph, trained.model.name, [given.name], [result.name], OPSET,
        tensors_to_rename={given.name: INPUT, result.name: OUTPUT})
    for tensor in (*model.graph.input, *model.graph.output):
        tensor.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.helper.set_model_props(model, {"classes": json.dumps(trained.classes), "image_size": str(trained.image_size)})
    onnx.checker.check_model(model)
    return model


def _make_added_scalars_vectors(graph, scope: str) -> None:
    """Gives scalar addends, as in MobileNetV3, the shape (1,), because tf2onnx 1.17 fails on one after a convolution.

    graph: a frozen tf.compat.v1.GraphDef, which is changed. scope: part of the names of the network's operations.
    """
    added = {name for node in graph.node if node.op == "AddV2" and scope in node.name for name in node.input}
    for node in graph.node:
        if node.op == "Const" and node.name in added and not node.attr["value"].tensor.tensor_shape.dim:
            node.attr["value"].tensor.tensor_shape.dim.add(size=1)
