"""Files that people give with --pretrained_weights, as the programs write them that made them."""
import contextlib
import fcntl
import functools
import gzip
import json
import pickle
import re
import struct
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import built

import model_zoo
import train as app
from common.errors import UserError
from model_zoo import applications
from model_zoo.layers import last_layer
from model_zoo.weight_files import keys, layers_in

layers = tf.keras.layers
pytestmark = pytest.mark.xdist_group("networks")  # of conftest.built
NAME, SIZE = "keras:MobileNetV3Small", 32


def base(name="MobileNetV3Small", size=SIZE):
    """A network as people take it: without its last layers, with weights that show which layer has which."""
    network = getattr(tf.keras.applications, name)(weights=None, include_top=False, input_shape=(size, size, 3))
    random = np.random.default_rng(0)
    for variable in network.variables:
        variable.assign(random.uniform(0.1, 1, variable.shape))
    return network


def usual(network, *front, name=None):
    return tf.keras.Sequential([layers.Input(network.input_shape[1:]), *front, network, layers.GlobalAveragePooling2D(),
                                layers.Dropout(0.2), layers.Dense(5)], name=name)


def functional(network):
    images = tf.keras.Input(network.input_shape[1:])
    x = layers.GlobalAveragePooling2D()(network(layers.Normalization()(layers.RandomFlip()(images)), training=False))
    return tf.keras.Model(images, layers.Dense(3)(layers.BatchNormalization()(layers.Dense(8)(x))))


def flat(network):
    x = layers.Dense(8)(layers.GlobalAveragePooling2D()(network.output))
    return tf.keras.Model(network.input, layers.Dense(3)(layers.Dense(8)(x)))


def twice(network):
    inner = usual(network, layers.Rescaling(1 / 255), name="inner")
    return tf.keras.Sequential([layers.Input(network.input_shape[1:]), layers.RandomFlip(), inner, layers.Dense(3)])


def colours(network):
    return usual(network, layers.Conv2D(3, 1))


def several(network, *others):
    images = tf.keras.Input(network.input_shape[1:])
    small = tf.keras.Sequential([layers.Conv2D(4, 3), layers.Conv2D(4, 3)], name="small")
    features = [layers.GlobalAveragePooling2D()(one(images)) for one in (small, network, *others)]
    return tf.keras.Model(images, layers.Dense(3)(layers.Concatenate()(features)))


def augmented(network):
    return usual(network, layers.RandomFlip(), layers.RandomRotation(0.1), layers.Rescaling(1 / 255, name="rescaling"))


@pytest.fixture(scope="module")
def networks():
    """A function that returns Keras's network and ours, of a name and an image size, made once."""
    return functools.cache(lambda name, size: (base(name, size), model_zoo.create_model(f"keras:{name}", 7, size)))


@pytest.mark.parametrize(("make", "name", "size"), [
    *((make, "MobileNetV3Small", SIZE) for make in (augmented, functional, flat, twice, colours, several)),
    pytest.param(augmented, "InceptionV3", 75, marks=pytest.mark.trainings)])  # most of whose layers Keras numbers
def test_the_network_is_taken_out_of_a_model(make, name, size, networks, tmp_path, capfd):
    """In front of it are augmentation, scaling or a convolution; other layers are behind it. Keras writes the weights
    of a model in a model in another order if some of its layers are not trained.
    """
    network, ours = networks(name, size)
    model, file = make(network), str(tmp_path / "w.h5")
    for trained, write in ((1, model.save), (0.3, model.save_weights), (0, model.save_weights)):
        for number, layer in enumerate(network.layers):
            layer.trainable = number >= (1 - trained) * len(network.layers)
        write(file)
        for variable in ours.variables:
            variable.assign(tf.zeros_like(variable))
        new = applications.load_pretrained(ours, file)
        assert last_layer(ours) in new and len(new) == (2 if name == "MobileNetV3Small" else 1)
        pairs = zip(*([layer for layer in one.layers if layer.weights] for one in (network, ours)), strict=False)
        for theirs, own in pairs:
            assert all((a == b).all() for a, b in zip(theirs.get_weights(), own.get_weights(), strict=True)), own.name
    said = capfd.readouterr().err
    assert (f"{file} is taken" in said) == (make is not flat)
    assert (f"without rescaling: keras:{name} scales pixels" in said) == (make is augmented)


def test_layers_are_known_in_any_process():
    """By what the numbers of Keras count, and as an exported model.h5 spells them."""
    assert keys(["conv2d_9", "b/c_1", "conv2d_10", "b/c"]) == keys(["conv2d", "b_c_7", "conv2d_1", "b_c_6"])
    assert keys(["conv2d_9", "x"]) != keys(["conv2d_9", "conv2d_10"])


def test_of_two_models_that_fit_none_is_taken(networks, tmp_path):
    network, _ = networks("MobileNetV3Small", SIZE)
    several(network, tf.keras.Sequential([network], name="other")).save_weights(tmp_path / "w.h5")
    with pytest.raises(UserError, match=r"has 2 models that fit keras:MobileNetV3Small: MobilenetV3small, other; write "
                                        r"the weights of one of them: model\.get_layer\('MobilenetV3small'\)\.save"):
        applications.load_pretrained(built(NAME, 7, SIZE), tmp_path / "w.h5")


def test_a_network_within_another_is_not_taken_for_it(tmp_path):
    """All layers of VGG16 are in VGG19, with the same names and shapes."""
    deeper = tf.keras.applications.VGG19(weights=None, include_top=False, input_shape=(SIZE, SIZE, 3))
    usual(deeper, layers.RandomFlip()).save_weights(tmp_path / "w.h5")
    with pytest.raises(UserError, match=r"of another network than keras:VGG16: block3_conv4 .*; give the --model whose "
                                        r"weights they are, or .*: base\.save\('weights\.h5'\)$") as error:
        applications.load_pretrained(built("keras:VGG16", 7, SIZE), tmp_path / "w.h5")
    assert len(str(error.value)) < 500


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with each kind of file that Keras and TensorFlow write of one small model."""
    folder = tmp_path_factory.mktemp("kinds")
    model = tf.keras.Sequential([layers.Input((8, 8, 3)), tf.keras.Sequential([layers.Conv2D(4, 3), layers.Conv2D(
        4, 3)], name="base"), layers.Flatten(), layers.Dense(2)])
    model.save(folder / "model")
    model.save(folder / "model.keras")
    (folder / "renamed.h5").write_bytes((folder / "model.keras").read_bytes())
    model.save_weights(folder / "keras3.weights.h5")
    model.save_weights(folder / "tensorflow" / "w")
    tf.train.Checkpoint(model=model).write(folder / "checkpoint")
    model.save(folder / "w.h5")
    return folder


@pytest.mark.parametrize("name", ["model", "model.keras", "renamed.h5", "keras3.weights.h5", "tensorflow/w.index",
                                  "tensorflow/w.data-00000-of-00001", "tensorflow/w", "tensorflow", "checkpoint"])
def test_the_cure_for_a_file_of_keras_works(name, small, tmp_path, monkeypatch):
    """The message has the Python that writes an .h5 file; with its values, it is the one that Keras itself writes."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{small}/") as error:
        layers_in(small / name)
    if renamed := re.search("rename it to (.*?);", str(error.value)):
        (small / renamed[1]).write_bytes((small / name).read_bytes())
    codes = re.findall(r"(?:keras\.models|model|tf\.train)\.\w+\(.*?\)(?:\.\w+\('.*?'\))?", str(error.value))
    model = keras.models.load_model(small / "w.h5")
    for variable in model.variables:
        variable.assign(tf.zeros_like(variable))
    done = 0
    for code in codes:
        with contextlib.suppress(AssertionError):  # one of two readers of a checkpoint is the one that wrote it
            exec(code, {"keras": keras, "tf": tf, "model": model})
            done += 1
    assert done >= max(1, len(codes) - 1)
    ours, theirs = (sorted((weight, array.tolist()) for inside in layers_in(path).values()
                           for leaf in inside.values() for weight, array in leaf.items())
                    for path in (tmp_path / "weights.h5", small / "w.h5"))
    assert [array for _, array in ours] == [array for _, array in theirs]


KINDS = {  # content of a file, or what makes it -> what is said of it
    "lfs.h5": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
               "is a Git LFS pointer; `git lfs pull` in its repository fetches the file"),
    "page.h5": (b"\xef\xbb\xbf\n<!DOCTYPE html>\n<title>Sign in</title>", "is a web page, such as a sign-in"),
    "denied.h5": (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>', "is a web page"),
    "found.h5": (b"404: Not Found", "begins with b'404: Not Found', not as an .h5 file of Keras"),
    "empty.h5": (b"", "is empty; copy or download it again"),
    "w.h5.gz": (gzip.compress(b"x" * 99), "is compressed; unpack it"),
    "new.pth": ({"archive/data.pkl": b"x"}, "is of PyTorch, whose weights fit no network of Keras; --pretrained"),
    "old.pth": (pickle.dumps(0x1950A86A20F9469CFC6C, 2), "is of PyTorch"),
    "w.safetensors": (struct.pack("<Q", 40) + json.dumps({"a": {"dtype": "F32"}}).encode(), "is of PyTorch"),
    "w.npz": ({"arr_0.npy": b"x"}, "is a zip file of arr_0.npy; give an .h5 file"),
    "cut.keras": (b"PK\3\4" + bytes(60), "is a damaged zip file; copy or download it again"),
    "none.h5": (None, "does not exist"),
    "https:/x.org/w.h5": (None, "is an address; download the file"),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_file_of_keras_is_named(name, tmp_path, capfd):
    """In a line, in a dry run, which loads no TensorFlow."""
    content, message = KINDS[name]
    if isinstance(content, dict):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for inner, text in content.items():
                archive.writestr(inner, text)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    code = app.main(["train.py", "--data_dir=digits", f"--model={NAME}", "--dry_run",
                     f"--pretrained_weights={tmp_path}/{name}"])
    out, err = capfd.readouterr()
    assert code == 1 and not out and err.startswith(f"train.py: {tmp_path}/{name} {message}")
    assert err.count("\n") == 1 and len(err) < 400


def test_folders_are_named(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "exported" / "saved_model").mkdir(parents=True)
    (tmp_path / "exported" / "saved_model" / "saved_model.pb").touch()
    (tmp_path / "exported" / "model.h5").touch()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "variables.index").touch()
    for path, message in ((tmp_path / "other", "is a folder; give an .h5 file"),
                          (tmp_path / "exported", f"is a folder; {tmp_path}/exported/model.h5 is empty"),
                          (tmp_path / "exported" / "saved_model", "is an exported SavedModel; give .*/model.h5$"),
                          *((one, f"is of a training; start from it with --init_checkpoint={one}")
                            for one in (checkpoint, *checkpoint.parents[:2]))):
        with pytest.raises(UserError, match=f"^{path} {message}"):
            layers_in(path)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda content: content[:300], "is cut off: it has 300 of {} bytes; copy or download it again"),
    (lambda content: content[:-1], "is cut off: it has"),
    (lambda content: content.replace(b"layer_names", b"other_names"), "has no weights of a Keras model; give a"),
    (lambda content: content.replace(b"TREE", b"TRUE"), "is damaged: .*; copy or download it again")])
def test_damage_is_one_line(damage, message, small, tmp_path):
    content = (small / "w.h5").read_bytes()
    (tmp_path / "w.h5").write_bytes(damage(content))
    with pytest.raises(UserError, match=f"^{tmp_path}/w.h5 {message.format(len(content))}"):
        layers_in(tmp_path / "w.h5")


def test_names_that_are_not_utf8_are_one_line(tmp_path):
    """h5py reads some names that it cannot look up: it raises UnicodeEncodeError."""
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file.attrs["layer_names"] = np.array([b"a\xff"], h5py.string_dtype())
    with pytest.raises(UserError, match=r"w\.h5 is damaged: .*can't encode"):
        layers_in(tmp_path / "w.h5")


def test_a_file_that_cannot_be_locked_is_read(small):
    """HDF5 itself fails on one that another process has locked (errno 11), as where there are no locks (37, 95)."""
    expected = layers_in(small / "w.h5").keys()
    with open(small / "w.h5", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="errno = 11"):
            h5py.File(small / "w.h5")
        assert layers_in(small / "w.h5").keys() == expected


def test_many_names_are_read(tmp_path):
    """Keras divides lists of names that are too long for HDF5."""
    model = tf.keras.Sequential([layers.Input((1,)), *(layers.Dense(1, name=f"{'x' * 4000}{n}") for n in range(17))])
    model.save_weights(tmp_path / "w.h5")
    with h5py.File(tmp_path / "w.h5") as file:
        assert "layer_names" not in file.attrs and "layer_names1" in file.attrs
    assert [*layers_in(tmp_path / "w.h5")] == [layer.name for layer in model.layers]
