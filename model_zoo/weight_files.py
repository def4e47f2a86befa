"""Reads the weights in an .h5 file of Keras, or says what another file is. Imports no TensorFlow, which takes time.

Such a file has a group for each layer of a model, in the order of the model, with the names of its weights. A model in
the model is one group, with the weights that were trained first.
"""
import itertools
import re
import zipfile
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np

from common.errors import UserError, listed, one_line
from common.files import stand_in, start_of

HDF5 = b"\x89HDF\r\n\x1a\n"
AGAIN = "copy or download it again"
LOADED = "write an .h5 file, with the Keras that wrote it: keras.models.load_model('{}').save('weights.h5')"
PYTORCH = "is of PyTorch, whose weights fit no network of Keras; --pretrained takes Keras's own ImageNet weights"
STARTS = {  # how a file begins that is no HDF5, and what it is
    rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf": "is compressed; unpack it, and give the .h5 file in it",
    rb"\x80[\x02-\x05]|.{8}\{\s*\"": PYTORCH}  # a pickle; safetensors

Leaves = dict[str, dict[str, np.ndarray]]  # layer -> name and values of each of its weights


def layers_in(path) -> dict[str, Leaves]:
    """Returns the layers of the model in an .h5 file of Keras, each with its weights. Raises UserError.

    A layer that is a model has the layers that it consists of, and any other layer itself. Left out are those that are
    in no network of `keras:NAME`: the statistics of a Normalization, the state of random numbers, and the convolution
    with which an exported model.h5 swaps red and blue.
    """
    if problem := _problem(Path(path)):
        raise UserError(f"{path} {problem}")
    try:
        with open(path, "rb") as content, h5py.File(content) as file:  # HDF5 by itself would lock it
            weights = file.get("model_weights", file)  # in a file with a whole model
            found = {name: _leaves(weights[name], name) for name in _attribute(weights, "layer_names")}
            problem = None if any(found.values()) else _without_weights(file, path)
    except Exception as error:  # h5py raises errors of any type for a damaged file
        sizes = re.search(r"eof = (\d+).*stored_eof = (\d+)", str(error))
        problem = f"cut off: it has {sizes[1]} of {sizes[2]} bytes" if sizes else f"damaged: {one_line(error)[:200]}"
        problem = f"is {problem}; {AGAIN}"
    if problem:
        raise UserError(f"{path} {problem}")
    return found


def _attribute(group, name: str) -> list[str]:
    """Returns a list of names in a group's attributes, where Keras divides a long one: name0, name1 and so on."""
    parts = [name] if name in group.attrs else itertools.takewhile(
        group.attrs.__contains__, map((name + "{}").format, itertools.count()))
    return [one.decode() if isinstance(one, bytes) else one for part in parts for one in group.attrs[part]]


def _leaves(group, layer: str) -> Leaves:
    leaves = defaultdict(dict)
    for name in _attribute(group, "weight_names"):
        leaves[name.rpartition("/")[0] or layer][name] = group[name][()]
    return {leaf: weights for leaf, weights in leaves.items()
            if all(one.dtype.kind == "f" and one.ndim for one in weights.values()) and not _swaps(*weights.values())}


def _swaps(kernel, *others) -> bool:
    return kernel.shape == (1, 1, 3, 3) and np.array_equal(kernel[0, 0], np.eye(3)[::-1])


def _without_weights(file, path) -> str:
    if {"layers", "vars", "_layer_checkpoint_dependencies"} & {*file}:
        return ("is a .weights.h5 file of Keras 3, without the names of layers; write an .h5 file where the model was "
                f"made: model.load_weights('{path}'); model.save('weights.h5')")
    return "has no weights of a Keras model; give a file that model.save('weights.h5') wrote"


def _problem(path: Path) -> str | None:
    """Returns what a path is, and what to do, or None for an HDF5 file. The content tells, whatever the name."""
    if re.search("(https?|s3|gs|hf):/", str(path)):
        return "is an address; download the file and give its path"
    if path.is_dir():
        return _about_folder(path)
    prefix = path.with_suffix("") if re.fullmatch(r"\.index|\.data-\d+-of-\d+", path.suffix) else path
    if Path(f"{prefix}.index").exists():
        return (f"is a checkpoint of TensorFlow; read it where the model was made, with model.load_weights('{prefix}') "
                f"or tf.train.Checkpoint(model=model).read('{prefix}'); then model.save('weights.h5')")
    if not path.is_file():
        return "does not exist, or is no file"
    start = start_of(path)
    if start.startswith(HDF5):
        return None
    if start.startswith(b"PK\3\4"):
        return _about_zip(path)
    if words := stand_in(start):
        return f"is {words}"
    return next((words for pattern, words in STARTS.items() if re.match(pattern, start, re.DOTALL)), None) or (
        f"begins with {start[:30]!r}, not as an .h5 file of Keras; {AGAIN}" if start else f"is empty; {AGAIN}")


def _about_folder(path: Path) -> str:
    if (path / "saved_model.pb").exists():
        if (exported := path.parent / "model.h5").exists():
            return f"is an exported SavedModel; give {exported}"
        return f"is a SavedModel; {LOADED.format(path)}"
    if [*path.glob("checkpoints/step-*"), *path.glob("step-*"), *path.glob("variables.index")]:
        return f"is of a training; start from it with --init_checkpoint={path}"
    file = next((file for kind in ("*.h5", "*.hdf5", "*.keras", "*.index") for file in path.glob(kind)), None)
    if not file:
        return "is a folder; give an .h5 file of Keras"
    return f"is a folder; {file} {problem}" if (problem := _problem(file)) else f"is a folder; give {file}"


def _about_zip(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:  # zipfile raises errors of several types for a damaged file
        return f"is a damaged zip file; {AGAIN}"
    if "config.json" in names and any(name.startswith("model.weights.") for name in names):
        called = path if path.suffix == ".keras" else path.with_suffix(".keras")
        return f"is a .keras file{'' if called == path else f'; rename it to {called.name}'}; {LOADED.format(called)}"
    if any(name.endswith("/data.pkl") for name in names):
        return PYTORCH
    return f"is a zip file of {listed(names, 3)}; give an .h5 file of Keras, which may be one of them"


def keys(names: Iterable[str]) -> list[tuple[str, int]]:
    """Returns what identifies layers in any process: the name, and which of the layers with this name it is.

    Keras numbers the layers of a process: conv2d_7 is the second of a network whose first is conv2d_6.
    """
    parts = [(name, int(number)) for name, number in (
        re.fullmatch(r"(.*?)(?:_(\d+))?", re.sub(r"\W", "_", name)).groups("0") for name in names)]
    ordered = sorted(parts)
    return [(name, ordered.index((name, number)) - bisect_left(ordered, (name,))) for name, number in parts]
