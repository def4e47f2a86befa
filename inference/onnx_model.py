"""The ONNX file of a trained model: pixels in, probabilities out. It needs the packages of the extra `onnx`."""
import importlib.util
import json
import logging
import os
from pathlib import Path

import tensorflow as tf

from common.files import write_atomically
from inference.preprocessing import central_part, resized
from inference.trained import Trained

INPUT = "images"
OUTPUT = "probabilities"
OPSET = 17  # of 2022; most runtimes have it
MISSING = ("model.onnx is not written, because tf2onnx is not installed; run the same command with "
           "`uv run --extra onnx train.py`")


def is_available() -> bool:
    """Whether the packages of the extra `onnx` are installed."""
    return all(importlib.util.find_spec(name) for name in ("onnx", "tf2onnx"))


def write_onnx(trained: Trained, path: Path) -> None:
    """Writes an ONNX file atomically. Raises OSError.

    Input `images`: uint8 (batch, height, width, 3), RGB, upright, of any size: the model takes the part that the
    evaluation takes, and resizes it. Output `probabilities`: float32 (batch, classes), in label order. The metadata
    have the class names, as a JSON list, and the size of the network's input.
    """
    write_atomically(path, converted(trained).SerializeToString())


def converted(trained: Trained):
    """Returns the onnx.ModelProto."""
    os.environ["TF2ONNX_CATCH_ERRORS"] = "FALSE"  # saves half of the time, which goes into copies to fall back on
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
    """Gives scalars that are added, as in MobileNetV3, the shape (1,): tf2onnx 1.17 fails on one after a convolution.

    graph: a frozen tf.compat.v1.GraphDef, which is changed. scope: part of the names of the network's operations.
    """
    added = {name for node in graph.node if node.op == "AddV2" and scope in node.name for name in node.input}
    for node in graph.node:
        if node.op == "Const" and node.name in added and not node.attr["value"].tensor.tensor_shape.dim:
            node.attr["value"].tensor.tensor_shape.dim.add(size=1)
