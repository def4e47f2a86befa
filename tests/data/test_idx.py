"""IDX files: Fashion-MNIST where Keras keeps it, read as Keras reads it; any such folder; damage said in one line."""
import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest

import train
from data import named, prepare, sources
from data.dataset import open_dataset
from data.preparing.run import make_preparation
from data.preparing.team import Team

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def write_idx(folder, train=36, validation=20, size=28, zipped=True, seed=0) -> Path:
    """Four IDX files of random images of 10 classes."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for prefix, count in (("train", train), ("t10k", validation)):
        images = random.integers(0, 256, (count, size, size), np.uint8)
        for name, array in (("images", images), ("labels", np.arange(count, dtype=np.uint8) % 10)):
            content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
            path = folder / f"{prefix}-{name}-idx{array.ndim}-ubyte"
            path.with_name(path.name + ".gz" * zipped).write_bytes(gzip.compress(content) if zipped else content)
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home of its own, without Debian's package."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("data.sources.fashion.FOLDERS", ("~/.keras/datasets/fashion-mnist", f"{tmp_path}/none"))
    return tmp_path


@pytest.fixture
def fashion(home) -> Path:
    return write_idx(home / ".keras/datasets/fashion-mnist")


def stored(split) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a dataset's TFRecords, decoded by TensorFlow."""
    import tensorflow as tf

    images, labels = [], []
    for record in tf.data.TFRecordDataset([str(path) for path in split.paths]):
        feature = tf.train.Example.FromString(record.numpy()).features.feature
        images.append(tf.io.decode_png(feature["image/encoded"].bytes_list.value[0]).numpy()[..., 0])
        labels.append(feature["image/class/label"].int64_list.value[0])
    return np.array(images), np.array(labels)


def load_as_keras_does():
    from tensorflow.keras.datasets import fashion_mnist

    return fashion_mnist.load_data()  # reads the files of ~/.keras, and downloads none that is there


@pytest.mark.usefixtures("fashion")
def test_fashion_is_what_keras_reads():
    dataset = named.open_named("fashion")
    expected = load_as_keras_does()
    for split, (images, labels) in zip((dataset.train, dataset.validation), expected, strict=True):
        found = stored(split)
        np.testing.assert_array_equal(found[0], images)
        np.testing.assert_array_equal(found[1], labels)
    pixels = expected[0][0].astype(float)
    np.testing.assert_allclose((dataset.mean, dataset.std), ([pixels.mean()] * 3, [pixels.std()] * 3), atol=6e-4)
    assert len(dataset.classes) == 10 and dataset.classes[7] == "Sneaker"


@pytest.mark.usefixtures("fashion")
def test_the_holdout_validates_on_the_last_training_images_and_has_no_test_images():
    dataset = named.open_named("fashion_holdout")
    (images, labels), _ = load_as_keras_does()
    for split, part in ((dataset.train, slice(0, 33)), (dataset.validation, slice(33, 36))):
        found = stored(split)
        np.testing.assert_array_equal(found[0], images[part])
        np.testing.assert_array_equal(found[1], labels[part])


def test_a_folder_without_compression_is_prepared_alike(fashion, tmp_path):
    plain = write_idx(tmp_path / "plain", zipped=False)
    for number, folder in enumerate((fashion, plain)):
        assert prepare.main(["data.prepare", f"--source={folder}", f"--output={tmp_path}/{number}"]) == 0
    zipped, plain = (open_dataset(tmp_path / str(number)) for number in range(2))
    assert zipped.train.paths[0].read_bytes() == plain.train.paths[0].read_bytes()
    assert plain.classes == tuple("0123456789") and (plain.train.samples, plain.validation.samples) == (36, 20)


def test_a_changed_file_is_not_mixed_with_an_unfinished_preparation(tmp_path, capfd):
    """The scratch folder is left as a killed run leaves it."""
    options = prepare.Options(source=str(write_idx(tmp_path / "a")), output=str(tmp_path / "b"), resize=None)
    (tmp_path / "b/.preparing").mkdir(parents=True)
    (tmp_path / "b/.preparing/plan.json").write_text(json.dumps(make_preparation(options, Team())[1]))
    for file in write_idx(tmp_path / "new", seed=1).iterdir():
        file.replace(tmp_path / "a" / file.name)
    assert prepare.main(["data.prepare", f"--source={options.source}", f"--output={options.output}"]) == 1
    assert "the images in --source have changed" in capfd.readouterr().err


def test_without_the_package_one_line_says_how_to_get_it(home, capfd):
    assert train.main(["train.py", "--data_dir=fashion", "--dry_run"]) == 1
    assert capfd.readouterr().err == (
        "train.py: fashion: Fashion-MNIST is not installed; run `apt-get install dataset-fashion-mnist`, or copy its "
        "four files to ~/.keras/datasets/fashion-mnist, where Keras keeps them, too\n")
    assert not [path for path in home.rglob("*") if path.name not in (".cache", "bigbatch")]


@pytest.mark.parametrize(("damage", "line"), [
    (lambda folder: (folder / f"{FILES[3]}.gz").unlink(), f"has neither {FILES[3]} nor {FILES[3]}.gz"),
    (lambda folder: cut(folder / f"{FILES[0]}.gz"), f"{FILES[0]}.gz cannot be read"),
    (lambda folder: (folder / f"{FILES[1]}.gz").write_bytes(b"not gzipped"), f"{FILES[1]}.gz cannot be read"),
    (lambda folder: rewrite(folder / f"{FILES[0]}.gz", lambda content: content[:-1]), "or is truncated"),
    (lambda folder: rewrite(folder / f"{FILES[1]}.gz", lambda content: content[:3]), "or is truncated"),
    (lambda folder: (folder / f"{FILES[2]}.gz").write_bytes((folder / f"{FILES[3]}.gz").read_bytes()),
     f"{FILES[2]}.gz is not an IDX file of 3-dimensional bytes"),
    (lambda folder: (folder / f"{FILES[1]}.gz").write_bytes((folder / f"{FILES[3]}.gz").read_bytes()),
     f"{FILES[0]} has 36 images but {FILES[1]} has 20 labels"),
])
def test_damaged_files_end_in_one_line(damage, line, tmp_path, capfd):
    folder = write_idx(tmp_path / "a")
    damage(folder)
    assert prepare.main(["data.prepare", f"--source={folder}", f"--output={tmp_path}/b"]) == 1
    error = capfd.readouterr().err
    assert line in error and error.count("\n") == 1 and not (tmp_path / "b").exists()


def test_other_sets_are_not_called_fashion(home, capfd):
    folder = write_idx(home / ".keras/datasets/fashion-mnist")
    rewrite(folder / f"{FILES[3]}.gz", lambda content: content[:-1] + bytes([10]))
    assert prepare.main(["data.prepare", "--source=fashion", f"--output={home}/b"]) == 1
    assert "is another dataset: it has more than 10 classes\n" in capfd.readouterr().err


def test_flags_for_images_are_refused(tmp_path, capfd):
    folder = write_idx(tmp_path / "a")
    for flag in ("--validation_fraction=0.1", "--resize_shorter=8", "--resize=8x8"):
        assert prepare.main(["data.prepare", f"--source={folder}", f"--output={tmp_path}/b", flag]) == 1
        assert "contains IDX files, which are stored as they are; remove" in capfd.readouterr().err


def test_the_package_of_debian():
    """The real set, where it is installed, has the numbers of images that its paper gives."""
    folder = Path("/usr/share/datasets/fashion-mnist")
    if not folder.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    source = sources.built_in("fashion")
    assert source.counts == {"train": 60_000, "validation": 10_000}
    holdout = sources.built_in("fashion_holdout")
    assert holdout.counts == {"train": 55_000, "validation": 5_000}


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def rewrite(path, change):
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))
