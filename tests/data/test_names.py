"""Prepared images keep the names of their files, and images that are there more than once are named."""
import shutil

import lmdb
import numpy as np
import pytest
import tensorflow as tf

from data.dataset import open_dataset
from data.formats import lmdb as lmdb_format
from tests.rigs.pictures import command, fill

FLAGS = ("--validation_fraction=0.25", "--shard_samples=5")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Three classes of 8 images, whose names have spaces, umlauts and a line end."""
    folder = tmp_path_factory.mktemp("names")
    fill(folder / "source", 8)
    for number, path in enumerate(sorted((folder / "source").rglob("*.*"))):
        path.rename(path.with_name(f"ein Bär\n{number}{path.suffix}"))
    return folder / "source"


@pytest.mark.parametrize("name", ["tfrecord", "lmdb", "recordio"])
def test_each_image_has_the_name_of_its_file(name, source, tmp_path):
    assert command(f"--source={source}", *FLAGS, f"--output={tmp_path}/o", f"--format={name}") == 0
    dataset, found = open_dataset(tmp_path / "o"), []
    for split in (dataset.train, dataset.validation):
        for sample, (image, label) in enumerate(split.records(np.arange(split.samples))):
            named = split.source_name(sample)
            assert (source / named).read_bytes() == image and named.startswith(f"{dataset.classes[label]}/")
            assert split.name(sample).startswith(f"{named} in {tmp_path}/o/")
            found.append(named)
    assert sorted(found) == sorted(str(path.relative_to(source)) for path in source.rglob("*.*"))


@pytest.mark.parametrize("name", ["tfrecord", "lmdb", "recordio"])
def test_the_shard_itself_has_it_where_its_format_can(name, source, tmp_path):
    """Without the files of checksums, as a dataset that other tools wrote. RecordIO has no place for it."""
    assert command(f"--source={source}", *FLAGS, f"--output={tmp_path}/o", f"--format={name}") == 0
    split = open_dataset(tmp_path / "o").train
    expected = [split.source_name(sample) for sample in range(split.samples)]
    for path in (tmp_path / "o").glob("*.crc32"):
        path.unlink()
    found = [split.source_name(sample) for sample in range(split.samples)]
    assert found == ([None] * len(expected) if name == "recordio" else expected)


def test_an_lmdb_has_caffes_keys(source, tmp_path):
    assert command(f"--source={source}", *FLAGS, f"--output={tmp_path}/o", "--format=lmdb") == 0
    split = open_dataset(tmp_path / "o").train
    with lmdb.open(str(split.paths[0]), readonly=True, lock=False) as database, database.begin() as transaction:
        keys = [key.decode() for key in transaction.cursor().iternext(values=False)]
    assert keys == [f"{number:08}_{split.source_name(number)}" for number in range(5)]


def test_a_long_name_is_cut_in_an_lmdb(tmp_path):
    lmdb_format.write(tmp_path / "a.lmdb", [(b"image", 0, "x" * 1000), (b"image", 1)])
    index = lmdb_format.read_index(tmp_path / "a.lmdb")
    assert [lmdb_format.source_name(None, index, sample) for sample in (0, 1)] == ["x" * 502, None]
    assert list(lmdb_format.records(tmp_path / "a.lmdb", index, np.arange(2))) == [(b"image", 0), (b"image", 1)]


def test_a_tfrecord_holds_it_as_others_expect(source, tmp_path):
    assert command(f"--source={source}", *FLAGS, f"--output={tmp_path}/o") == 0
    split = open_dataset(tmp_path / "o").validation
    [path] = split.paths[:1]
    first = tf.train.Example.FromString(next(iter(tf.data.TFRecordDataset(str(path)))).numpy()).features.feature
    assert first["image/filename"].bytes_list.value[0].decode() == split.source_name(0)


def test_what_is_there_more_than_once_is_named(tmp_path, capfd):
    """A copy in the class, one in another class, and one in both splits: each is told once. The other images differ."""
    fill(tmp_path / "s" / "train", 4)
    fill(tmp_path / "s" / "val", 2)
    one, two = sorted(path for path in (tmp_path / "s" / "train").iterdir())[:2]
    first, second, third, *_ = sorted(one.iterdir())
    for split in ("train", "val"):  # the pictures of `fill` are the same in both
        for number, path in enumerate(sorted((tmp_path / "s" / split).rglob("*.*"))):
            path.write_bytes(path.read_bytes() + split.encode() + bytes([number]))
    shutil.copy(first, one / "copy.jpg")
    shutil.copy(second, two / "other.jpg")
    shutil.copy(third, tmp_path / "s" / "val" / one.name / "leak.jpg")
    capfd.readouterr()
    assert command(f"--source={tmp_path}/s", f"--output={tmp_path}/o") == 0
    told = [line.removeprefix("data.prepare: ") for line in capfd.readouterr().err.splitlines()]
    names = {key: f"train/{one.name}/{path.name}" for key, path in (("a", first), ("b", second), ("c", third))}
    [note] = [line for line in told if line.startswith("identical images (1): ")]
    assert {*note.partition("): ")[2].split(" = ")} == {names["a"], f"train/{one.name}/copy.jpg"}
    [twice] = [line for line in told if line.startswith("identical images with different labels (1): ")]
    assert names["b"] in twice and f"train/{two.name}/other.jpg" in twice
    [leaked] = [line for line in told if line.startswith("identical images in both splits, ")]
    assert leaked.endswith(f": {names['c']} = val/{one.name}/leak.jpg")
