"""Datasets made elsewhere are adopted where they lie, or refused in one line: each here is written by other code."""
import gzip
import io
import itertools
import json
import struct
import tarfile
import zlib

import numpy as np
import pytest
from conftest import run

from data import formats
from data.dataset import open_dataset
from data.formats import messages
from tests.rigs.pictures import CLASSES, command, contents, encode, fill, picture

COUNTS = {"train": 12, "validation": 6}


def images(split):
    """(JPEG, label from 0) pairs, three classes."""
    return [(encode(picture(1000 * (split == "validation") + number)), number % 3) for number in range(COUNTS[split])]


def unchanged(number, *record):
    return record


def slim(folder, texts=lambda label: {"image/class/text": f"class {label}", "image/class/synset": f"n{label}"},
         change=unchanged):
    """ImageNet as TF-slim writes it, small: labels from 1, no suffix, no index."""
    import tensorflow as tf

    for split, shards in (("train", 2), ("validation", 1)):
        pairs = images(split)
        for shard in range(shards):
            with tf.io.TFRecordWriter(str(folder / f"{split}-{shard:05d}-of-{shards:05d}")) as writer:
                for number, (image, label) in enumerate(pairs[shard::shards]):
                    pictures, labels = change(number, [image], [label + 1])
                    kind = tf.train.Feature(int64_list=tf.train.Int64List(value=labels)) if (
                        [*map(type, labels)] == [int] * len(labels)) else tf.train.Feature(
                            float_list=tf.train.FloatList(value=labels))
                    feature = {"image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=pictures)),
                               "image/class/label": kind}
                    feature |= {name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
                                for name, text in texts(label + 1).items()}
                    writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return folder


def caffe(folder, value=messages.datum, change=unchanged):
    """LMDB as convert_imageset writes it: the keys hold the files' names, and there is a lock file."""
    import lmdb

    for split, name in zip(COUNTS, ("ilsvrc12_train_lmdb", "ilsvrc12_val_lmdb"), strict=True):
        with lmdb.open(str(folder / name), map_size=1 << 26) as database, database.begin(write=True) as transaction:
            for number, (image, label) in enumerate(images(split)):
                key = f"{number:08d}_n{label}/{number}.JPEG".encode()
                transaction.put(key, value(*change(number, image, label)))
    return folder


def mxnet(folder, change=unchanged):
    for split, name in zip(COUNTS, ("train.rec", "val.rec"), strict=True):
        with open(folder / name, "wb") as file:
            for number, (image, label) in enumerate(images(split)):
                image, label, flag = change(number, image, label, 0)
                data = struct.pack("<IfQQ", flag, label, number, 0) + image
                file.write(struct.pack("<II", 0xced7230a, len(data)) + data + bytes(-len(data) % 4))
    return folder


def tree(folder):
    fill(folder / "train", 4)
    fill(folder / "validation", 2, first=1000)
    return folder


MAKERS = {"tfrecord": slim, "lmdb": caffe, "recordio": mxnet, "folder": tree}
CAFFE2 = b"\x0a\x0a\x08\x01\x10\x04\x32\x04jpeg\x0a\x08\x08\x01\x10\x02\x22\x02\xac\x02"  # image and label


@pytest.mark.parametrize("kind", MAKERS)
def test_adopted_in_place(tmp_path, capsys, kind):
    before = contents(MAKERS[kind](tmp_path))
    assert command("--adopt", f"--output={tmp_path}") == 0, capsys.readouterr().err
    after = contents(tmp_path)
    new = set(after) - set(before)
    indexes = {str(formats.get(kind).index_path(name)) for name in before if kind in ("tfrecord", "recordio")}
    assert new == indexes | {"dataset.json"} and after.items() >= before.items()
    dataset = open_dataset(tmp_path)
    assert dataset.format == kind and dataset.first_label == (1 if kind == "tfrecord" else 0)
    assert dataset.classes == {"tfrecord": ("class 1", "class 2", "class 3"), "folder": CLASSES}.get(kind, tuple("012"))
    assert (dataset.train.samples, dataset.validation.samples) == (12, 6)
    for name, split in (("train", dataset.train), ("validation", dataset.validation)):
        pairs = [(bytes(image), label - dataset.first_label)
                 for path, entries in zip(split.paths, split.entries, strict=True)
                 for image, label in split.kind.records(path, entries, np.arange(len(entries)))]
        if kind != "folder":
            assert sorted(pairs) == sorted(images(name))
    assert command("--verify", f"--output={tmp_path}") == 0
    assert command("--adopt", f"--output={tmp_path}") == 1 and "already" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["lmdb", "recordio"])
def test_several_ranks_write_the_same(tmp_path, kind):
    for name in ("alone", "shared"):
        (tmp_path / name).mkdir()
        MAKERS[kind](tmp_path / name)
    assert command("--adopt", f"--output={tmp_path}/alone") == 0
    done = run("mpirun", 2, "-m", "data.prepare", "--adopt", f"--output={tmp_path}/shared")
    assert done.returncode == 0, done.stderr
    one, other = contents(tmp_path / "alone"), contents(tmp_path / "shared")
    assert {n: one[n] for n in one if "lock.mdb" not in n} == {n: other[n] for n in other if "lock.mdb" not in n}


def test_names_of_classes(tmp_path, capsys):
    """By synset where two classes have the same text, by number where one has none, by a file where there is one."""
    def case(name, texts, *flags):
        folder = tmp_path / name
        folder.mkdir()
        assert command("--adopt", f"--output={slim(folder, texts)}", *flags) == 0, capsys.readouterr().err
        return json.loads((folder / "dataset.json").read_text())["classes"]

    same_names = lambda label: {"image/class/text": "crane", "image/class/synset": f"n{label}"}  # noqa: E731
    assert case("synsets", same_names) == ["n1", "n2", "n3"]
    assert case("numbers", lambda label: {"image/class/text": "one"} if label == 1 else {}) == ["1", "2", "3"]
    (tmp_path / "names").write_text("\ufefftench\ngreat white shark\nécrevisse\n")
    assert case("file", same_names, f"--classes={tmp_path}/names") == ["tench", "great white shark", "écrevisse"]
    (tmp_path / "few").write_text("tench\n")
    assert command("--adopt", f"--output={slim(make(tmp_path / 'few names'))}", f"--classes={tmp_path}/few") == 1
    assert "lists 1 classes, but the labels run from 1 to 3" in capsys.readouterr().err


def make(folder):
    folder.mkdir()
    return folder


def first_file(folder, kind):
    return folder / {"tfrecord": "train-00000-of-00002", "recordio": "train.rec",
                     "lmdb": "ilsvrc12_train_lmdb/data.mdb"}[kind]


@pytest.mark.parametrize("kind", ["tfrecord", "lmdb", "recordio"])
@pytest.mark.parametrize("left", [0.0, 0.5, -1])
def test_truncated_files_are_refused(tmp_path, capsys, kind, left):
    file = first_file(MAKERS[kind](tmp_path), kind)
    content = file.read_bytes()
    file.write_bytes(content[:-1] if left == -1 else content[:int(len(content) * left)])
    before = set(contents(tmp_path))
    assert command("--adopt", f"--output={tmp_path}") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and str(file if "lmdb" not in kind else file.parent) in lines[0]
    assert {name for name in set(contents(tmp_path)) - before if not name.endswith(".idx")} == set()


@pytest.mark.parametrize("kind", ["tfrecord", "recordio"])
def test_an_index_that_a_killed_run_left_half_written_is_no_shard(tmp_path, capsys, kind):
    index = formats.get(kind).index_path(first_file(MAKERS[kind](tmp_path), kind))
    index.with_name(f"{index.name}.part").write_bytes(b"0 1")
    assert command("--adopt", f"--output={tmp_path}") == 0, capsys.readouterr().err
    assert index.exists() and not index.with_name(f"{index.name}.part").exists()


@pytest.mark.parametrize("kind", ["tfrecord", "recordio"])
def test_an_index_of_another_file_is_refused(tmp_path, capsys, kind):
    """A sound one is kept as it is, byte for byte, even if it is written in another way than ours."""
    file = first_file(MAKERS[kind](tmp_path), kind)
    formats.get(kind).make_index(file)
    index = formats.get(kind).index_path(file)
    index.write_text(index.read_text().rstrip("\n").replace("\t", " "))
    sound = index.read_bytes()
    assert command("--adopt", f"--output={tmp_path}") == 0 and index.read_bytes() == sound
    (tmp_path / "dataset.json").unlink()
    index.write_bytes(b"\n".join(sound.split(b"\n")[:-1]))
    assert command("--adopt", f"--output={tmp_path}") == 1
    lines = capsys.readouterr().err.splitlines()
    assert file.name.split(".")[0] in lines[-1] and not (tmp_path / "dataset.json").exists()


def test_what_is_no_dataset(tmp_path, capsys):
    def refused(folder, message):
        assert command("--adopt", f"--output={folder}") == 1
        [line] = capsys.readouterr().err.splitlines()
        assert message in line

    refused(tmp_path / "none", "there is no folder")
    refused(make(tmp_path / "empty"), "no dataset of a known format")
    refused(caffe(make(tmp_path / "raw"), lambda image, label: messages.datum(image, label)[:9]), "not a valid Datum")
    refused(caffe(make(tmp_path / "Caffe2's"), lambda image, label: CAFFE2), "is not a Datum with an encoded image")
    pixels = messages._classes()["Datum"](channels=3, height=1, width=1, data=b"abc", label=1).SerializeToString()
    refused(caffe(make(tmp_path / "raw pixels"), lambda image, label: pixels), "--encoded")
    refused(caffe(make(tmp_path / "negative"), lambda image, label: messages.datum(image, label - 1)), "from -1 to 1")
    beyond = make(tmp_path / "beyond")
    held_out = dict(images("validation"))
    caffe(beyond, lambda image, label: messages.datum(image, label + (label == 2 and image in held_out)))
    refused(beyond, "the validation split contains label 3")


BAD = [  # what record 3 of each file has instead of an image and a label
    (slim, lambda image, label: (image, [1, 2]), "has 2 values of image/class/label (int64)"),
    (slim, lambda image, label: (image, []), "has 0 values of image/class/label (int64)"),
    (slim, lambda image, label: (image, [1.0]), "has 0 values of image/class/label (int64)"),
    (slim, lambda image, label: (image * 2, label), "has 2 values of image/encoded (bytes)"),
    (slim, lambda image, label: ([], label), "has 0 values of image/encoded (bytes)"),
    (slim, lambda image, label: ([b""], label), "(0 bytes, "),
    (mxnet, lambda image, label, flag: (image, 0.5, flag), "label 0.5)"),
    (mxnet, lambda image, label, flag: (image, np.nan, flag), "label nan)"),
    (mxnet, lambda image, label, flag: (b"abcdefgh" + image, label, 2), "a list of 2 labels"),
    (mxnet, lambda image, label, flag: (b"", label, flag), "(0 bytes, "),
    (caffe, lambda image, label: (image, None), "has 0 values of label"),
    (caffe, lambda image, label: (b"", label), "is not a Datum with an encoded image"),
]


@pytest.mark.parametrize(("maker", "bad", "problem"), BAD, ids=itertools.count())
def test_adopting_and_verifying_refuse_what_training_cannot_read(tmp_path, capsys, maker, bad, problem):
    """DALI reads such a TFRecord with any label, stops or crashes."""
    folder = maker(make(tmp_path / "bad"), change=lambda number, *record: bad(*record) if number == 3 else record)
    assert command("--adopt", f"--output={folder}") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("data.prepare: --adopt: ") and "record 3" in line and problem in line
    assert command("--adopt", f"--output={maker(make(tmp_path / 'good'))}") == 0
    (folder / "dataset.json").write_bytes((tmp_path / "good" / "dataset.json").read_bytes())
    capsys.readouterr()
    assert command("--verify", f"--output={folder}") == 1
    *lines, total = capsys.readouterr().err.splitlines()
    assert len(lines) == (3 if maker is slim else 2) and f" {len(lines)} of 18 records cannot be used" in total
    assert all(", record 3: " in line and problem in line for line in lines)


def tar(content) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        entry = tarfile.TarInfo("a.jpg")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return written.getvalue()


FOREIGN = {
    "is compressed with gzip; ": gzip.compress, "is compressed with zlib; ": zlib.compress,
    "is a tar archive; ": tar, "is a zip archive; ": lambda content: b"PK\3\4" + content,
    "is a Parquet file; ": lambda content: b"PAR1" + content, "is not a TFRecord, ": lambda content: b"no record " * 9,
    "is truncated; it ends inside record 0": lambda content: content[:100],
    "is truncated; it ends inside record 5": lambda content: content[:-1],
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_tfrecord_is_called_by_its_name(tmp_path, capsys, kind):
    file = first_file(slim(tmp_path), "tfrecord")
    file.write_bytes(FOREIGN[kind](file.read_bytes()))
    assert command("--adopt", f"--output={tmp_path}") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"{file} {kind}" in line


def test_a_first_class_without_images_keeps_its_label(tmp_path):
    tree(tmp_path)
    for split in ("train", "validation"):
        (tmp_path / split / "a").mkdir()
    assert command("--adopt", f"--output={tmp_path}") == 0
    dataset = open_dataset(tmp_path)
    assert dataset.first_label == 0 and dataset.classes == tuple(sorted(("a", *CLASSES)))


def test_mean_and_deviation_are_measured(tmp_path):
    import io

    from PIL import Image

    assert command("--adopt", f"--output={mxnet(tmp_path)}") == 0
    pixels = np.concatenate([np.asarray(Image.open(io.BytesIO(image))).reshape(-1, 3) for image, _ in images("train")])
    dataset = open_dataset(tmp_path)
    np.testing.assert_allclose(dataset.mean, pixels.mean(axis=0), atol=1e-3)
    np.testing.assert_allclose(dataset.std, pixels.std(axis=0), atol=1e-3)
