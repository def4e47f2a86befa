"""Each format: what is written is read again, by Python and by DALI from any position; damage is refused."""
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, require_tool
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data import formats
from data.augmentation import AUGMENTATIONS
from data.dataset import Split, open_dataset
from data.formats import folder, messages, recordio

MAGIC = struct.pack("<I", 0xced7230a)
INDEXED = ("tfrecord", "recordio")


def samples(count):
    """Bytes of many lengths, some with RecordIO's magic word where a reader stumbles over it, and labels."""
    random = np.random.default_rng(0)
    made = [(random.bytes(17 + number % 9), number * 7 % 1001) for number in range(count)]
    made[1] = (MAGIC * 3, 1000)
    made[2] = (random.bytes(8) + MAGIC + random.bytes(3), 0)
    made[3] = (random.bytes(5) + MAGIC, 1)  # not at a multiple of four: no harm
    return made


def dali_reads(read, count, batch=8):
    from nvidia.dali import Pipeline

    pipeline = Pipeline(batch_size=batch, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(*read())
    pipeline.build()
    got = []
    for _ in range(-(-count // batch)):
        encoded, labels = pipeline.run()
        assert str(labels.dtype).endswith("INT64") and labels[0].shape() == [1]
        got += zip((bytes(np.array(one)) for one in encoded), np.array(labels.as_array()).ravel().tolist(), strict=True)
    return got[:count]


@pytest.mark.parametrize("name", formats.WRITTEN)
def test_what_is_written_is_read(name, tmp_path):
    kind, written = formats.get(name), samples(57)
    path = tmp_path / f"a shard{kind.SUFFIX}"
    kind.write(path, written)
    index = kind.read_index(path)
    assert len(index) == 57
    assert list(kind.records(path, index, np.arange(57))) == written
    assert list(kind.records(path, index, np.array([3, 20, 56]))) == [written[3], written[20], written[56]]
    assert dali_reads(kind.reader([(path, index, np.arange(57))], tmp_path), 57) == written


@pytest.mark.parametrize("name", formats.WRITTEN)
def test_dali_reads_on_from_any_position(name, tmp_path):
    kind, written = formats.get(name), samples(40)
    paths = [tmp_path / f"{number}{kind.SUFFIX}" for number in range(3)]
    for path, start, end in zip(paths, (0, 15, 22), (15, 22, 40), strict=True):
        kind.write(path, written[start:end])
    split = Split(name, tuple(paths), (15, 7, 18), order="global" if kind.ANY_ORDER else "file")
    wanted = [*range(18, 22), *range(15), *range(22, 40), *range(22, 32)]  # from within a file; one file twice over
    if kind.ANY_ORDER:
        wanted = [39, 3, 38, 3, *wanted]
    else:
        with pytest.raises(ValueError, match="file after file"):
            kind.reader(split.slices(np.array([3, 20, 4])), tmp_path)
    read = kind.reader(split.slices(np.array(wanted)), tmp_path)
    assert dali_reads(read, len(wanted)) == [written[number] for number in wanted]


def test_lmdb_leaves_no_lock_and_is_the_same_each_time(tmp_path):
    for number in (1, 2):
        formats.get("lmdb").write(tmp_path / str(number), samples(600))
    first, second = ((tmp_path / name / "data.mdb").read_bytes() for name in ("1", "2"))
    assert first == second and os.listdir(tmp_path / "1") == ["data.mdb"]


def test_caffes_message_by_hand():
    """Tag = field number * 8 + wire type: 4 is data, 5 the label, 7 `encoded`."""
    assert messages.datum(b"jpeg", 300) == b"\x22\x04jpeg\x28\xac\x02\x38\x01"


def test_recordio_by_hand(tmp_path):
    """Word 1 the magic, word 2 the length with how it goes on in its upper 3 bits; then the header and the image."""
    recordio.write(tmp_path / "a.rec", [(b"abcde", 3)])
    header = struct.pack("<IfQQ", 0, 3.0, 0, 0)
    assert (tmp_path / "a.rec").read_bytes() == MAGIC + struct.pack("<I", 29) + header + b"abcde" + bytes(3)
    recordio.write(tmp_path / "b.rec", [(MAGIC + b"xy", 3)])
    assert (tmp_path / "b.rec").read_bytes() == (
        MAGIC + struct.pack("<I", 1 << 29 | 24) + header + MAGIC + struct.pack("<I", 3 << 29 | 2) + b"xy" + bytes(2))
    assert (tmp_path / "b.idx").read_text() == "0\t0\n"


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_made_later_is_the_same(name, tmp_path):
    kind, path = formats.get(name), tmp_path / "shard"
    kind.write(path, samples(30))
    made = kind.index_path(path).read_bytes()
    kind.index_path(path).unlink()
    kind.make_index(path)
    assert kind.index_path(path).read_bytes() == made


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(formats.WRITTEN), st.data())
def test_a_damaged_shard_is_read_or_refused_in_words(tmp_path_factory, name, data):
    """Bytes changed or cut anywhere, in the shard or its index: records come out, or an error that says where."""
    import lmdb

    kind, folder = formats.get(name), tmp_path_factory.mktemp("fuzzed")
    path = folder / f"shard{kind.SUFFIX}"
    kind.write(path, samples(12))
    files = [path / "data.mdb"] if path.is_dir() else [path, kind.index_path(path)]
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[:data.draw(st.integers(len(content) // 2, len(content)))])
    try:
        index = kind.read_index(path)
        assert all(isinstance(image, bytes) for image, _ in kind.records(path, index, np.arange(len(index))))
    except (ValueError, OSError, lmdb.Error) as error:
        assert str(error)


def cut(path, count=1):
    path.write_bytes(path.read_bytes()[:-count])


def swap(path):
    """As many lines, of which one comes twice and one is gone."""
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[1], *lines[1:]]))


@pytest.mark.parametrize(("name", "damage", "message"), [
    ("tfrecord", lambda d: cut(d / "train 2.tfrecord"), "train 2.tfrecord.*truncated"),
    ("recordio", lambda d: cut(d / "train 2.rec", 4), "train 2.rec.*truncated"),
    ("recordio", lambda d: cut(d / "train 2.rec", 2000), "train 2.rec.*truncated"),
    ("recordio", lambda d: (d / "train 2.idx").write_bytes((d / "train 1.idx").read_bytes()), "no RecordIO record"),
    ("recordio", lambda d: (d / "train 2.idx").write_text("0\t0\n1\t999999999\n"), "truncated.*points beyond"),
    ("recordio", lambda d: (d / "train 2.idx").write_text("0\t0\n1\t0\n"), "is not a RecordIO index"),
    ("recordio", lambda d: (d / "train 2.idx").write_text("x"), "not an index with one line"),
    ("tfrecord", lambda d: (d / "train 2.tfrecord.idx").write_bytes((d / "train 1.tfrecord.idx").read_bytes()),
     "idx is not the index of"),
    ("tfrecord", lambda d: (d / "train 2.tfrecord.idx").write_text(""), "idx is not the index of"),
    ("tfrecord", lambda d: swap(d / "train 2.tfrecord.idx"), "idx is not the index of"),
    ("lmdb", lambda d: cut(d / "train 2.lmdb" / "data.mdb"), "train 2.lmdb.*truncated"),
    ("lmdb", lambda d: cut(d / "train 2.lmdb" / "data.mdb", 100_000), "train 2.lmdb"),
    ("lmdb", lambda d: (d / "train 2.lmdb" / "data.mdb").unlink(), "no data.mdb"),
    ("lmdb", lambda d: (d / "train 2.lmdb" / "data.mdb").write_bytes(bytes(9000)), "train 2.lmdb"),
    ("folder", lambda d: os.rename(d / "val" / "class 3", d / "val" / "class x"), "class 'class 3' must have a folder"),
])
def test_a_damaged_dataset_is_refused(in_format, tmp_path, name, damage, message):
    copy = shutil.copytree(in_format(name), tmp_path / "copy")
    damage(copy)
    with pytest.raises(UserError, match=message):
        open_dataset(copy)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_dataset_in_each_format_opens(in_format, name):
    dataset = open_dataset(in_format(name))
    assert (dataset.format, dataset.train.samples, dataset.validation.samples) == (name, 1437, 353)
    assert len(dataset.classes) == 10
    if name != "folder":
        assert dataset.classes == tuple(json.loads((in_format(name) / "dataset.json").read_text())["classes"])


def test_labels_may_count_from_one(in_format, tmp_path):
    """As TF-slim's and NVIDIA's ImageNet has them."""
    from data.feed import Feed

    copy = shutil.copytree(in_format("recordio"), tmp_path / "copy")
    described = json.loads((copy / "dataset.json").read_text())
    (copy / "dataset.json").write_text(json.dumps(described | {"first_label": 1}))

    def labels(folder):
        with Feed(open_dataset(folder), 32, AUGMENTATIONS["none"], 0).validation(353) as (batches, _):
            return next(batches)[1].numpy()

    np.testing.assert_array_equal(labels(copy), labels(in_format("recordio")) - 1)


@pytest.mark.trainings
@pytest.mark.parametrize(("name", "order"), [("tfrecord", "global"), ("recordio", "file")])
def test_files_are_mapped_unless_they_should_not_be(in_format, name, order, tmp_path):
    """By system calls. What DALI reads is the same."""
    require_tool("strace")
    program = ("import sys, numpy as np; from data.dataset import open_dataset; from data.feed import Feed\n"
               "from data.augmentation import AUGMENTATIONS\n"
               "from data.pipeline import DecoderSettings\n"
               "dataset, device = open_dataset(sys.argv[1]).in_order(sys.argv[3]), DecoderSettings(mmap=sys.argv[2])\n"
               "feed = Feed(dataset, 32, AUGMENTATIONS['none'], 0, device=device)\n"
               "with feed.train(0, 2, 64, 64) as batches: print([next(batches)[1].numpy().sum() for _ in range(2)])")
    found = {}
    for mmap in ("auto", "true", "false"):
        trace = tmp_path / mmap
        words = ["strace", "-f", "-qq", "-y", "-e", "trace=mmap,read,pread64", "-o", trace]
        words += [sys.executable, "-c", program, in_format(name), mmap, order]
        done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        calls = [line for line in trace.read_text().splitlines() if f"{in_format(name)}/train" in line]
        found[mmap] = done.stdout, any("mmap(" in line for line in calls)
    assert found["auto"] == found["true"] == (found["false"][0], True) and not found["false"][1]


def test_the_names_of_a_folder_are_sent_compressed(tmp_path):
    """As many as in ImageNet: 1,000 classes of 1,281 images. Also names that are not UTF-8, and an empty class."""
    for name in ("cat", "dog", "empty"):
        (tmp_path / name).mkdir()
    for name in ("cat/1.jpg", "dog/2.jpg", "dog/\udcff.jpg"):
        (tmp_path / name).write_bytes(b"")
    small = folder.Listing(tmp_path)
    again = pickle.loads(pickle.dumps(small))
    assert again.files == small.files and again.labels.tolist() == small.labels.tolist() == [0, 1, 1]
    large = folder.Listing(tmp_path)
    large.files = [f"n{number // 1281:08}/n{number // 1281:08}_{number * 7919 % 100_000}.JPEG"
                   for number in range(1_281_000)]
    large.labels = np.repeat(np.arange(1000), 1281)
    sent = pickle.dumps(large)
    assert len(sent) < 8e6 and pickle.loads(sent).files == large.files
