"""The spool: LMDB and RecordIO in any order, in bounded space, and what becomes of it when something fails."""
import contextlib
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import ROOT, SmallDisk

from common.files import scratch_path
from data import order
from data.augmentation import AUGMENTATIONS
from data.dataset import ORDERS, Split, Window, open_dataset
from data.feed import Feed
from data.mixing import Mixing
from data.staging import spool
from data.staging.spool_writer import write_file
from tests.rigs.pictures import command, fill
from tests.rigs.plans import plan

PAGE = 4096  # bytes
SPOOLED = ("lmdb", "recordio")


@pytest.fixture
def small_files(monkeypatch):
    """Spools of many small files, of which little is written ahead. Returns the folder that holds them."""
    for name, value in {"FIRST_FILE": 4096, "LARGEST_FILE": 16384, "AHEAD": 32768, "FIRST_SAMPLES": 8}.items():
        monkeypatch.setattr(spool, name, value)


def batches_of(folder, shard, shards, batch=8):
    """Training batches over the end of an epoch, and two passes through validation."""
    feed = Feed(open_dataset(folder), 32, AUGMENTATIONS["crop"], 3, shard, shards, mixing=Mixing(0.4, 1.0))
    with feed.train(1200, 400 // batch, batch * shards, batch) as batches:
        found = [[part.numpy() for part in next(batches)] for _ in range(400 // batch)]
    with feed.validation(batch) as (batches, samples):
        return found + [[part.numpy() for part in next(batches)] for _ in range(2 * -(-samples // batch) + 3)]


@pytest.mark.parametrize("name", SPOOLED)
def test_batches_are_those_of_tfrecords_to_the_bit(in_format, small_files, name):
    for shard in range(2):
        for ours, theirs in zip(batches_of(in_format(name), shard, 2), batches_of(in_format("tfrecord"), shard, 2),
                                strict=True):
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(one, other)


def test_the_layout_by_hand():
    """Stored sizes 100 and 200; a slot has 112 bytes more. A file has at most 530, then 1,060 bytes, or 2, then 4
    samples.
    """
    index = np.array([[0, 100], [100, 200], [300, 100], [400, 100]])
    split = Split("recordio", (Path("a"), Path("b")), (2, 2), (index[:2], index[2:]))
    layout = spool.Layout(split, np.array([1, 0, 3, 2, 2, 2, 2, 2, 2, 2]), Path("/s"), kept=3, room=1 << 30)
    assert layout.slots.tolist() == [312, 212, 212, 212, 212, 212, 212, 212, 212, 212]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool, "FIRST_FILE", 530)
        patch.setattr(spool, "FIRST_SAMPLES", 2)
        assert layout.starts.tolist() == [0, 2, 6, 10]
    assert (layout.files, layout.kept_files) == (3, 2)
    assert layout.entries(0).tolist() == [[0, 312], [312, 212]]
    assert [layout.visit(read) for read in (0, 1, 2, 9, 10, 13, 25)] == [0, 0, 1, 2, 3, 4, 6 + 1]


def test_a_disk_that_is_full_leaves_no_hole(in_format, monkeypatch):
    """It lacks a page for the last records. A process that reads a hole of a mapped file is killed by SIGBUS then."""
    split = open_dataset(in_format("lmdb")).train
    with SmallDisk("size=1m") as disk:
        for size in range(8_000, 16_000, 250):
            monkeypatch.setattr(spool, "FIRST_FILE", size)
            layout = spool.Layout(split, np.arange(split.samples), disk.path, kept=1, room=1 << 30)
            pages = -(-int(layout.entries(0)[-1].sum()) // PAGE)
            disk.remount(f"size={(pages - 1) * PAGE}")
            with pytest.raises(OSError, match="No space left"):
                write_file(layout, 0, None)
            assert not layout.path(0).exists()
            disk.remount(f"size={pages * PAGE}")
            write_file(layout, 0, None)
            layout.path(0).unlink()


def test_it_takes_little_space_and_dali_opens_nothing_that_is_not_there(in_format, small_files, monkeypatch):
    """One file for each sample, and none is written before it is needed."""
    monkeypatch.setattr(spool, "FIRST_SAMPLES", 1)
    monkeypatch.setattr(spool, "LARGEST_SAMPLES", 1)
    monkeypatch.setattr(spool, "AHEAD", 0)
    dataset, most = open_dataset(in_format("lmdb")), 0
    with Feed(dataset, 32, AUGMENTATIONS["none"], 0).train(0, 179, 8, 8) as batches:
        for _ in range(179):
            next(batches)
            most = max(most, len(list(batches.spool.folder.glob("*.tfrecord"))))
    kept, lead = 8 * (spool.READ_AHEAD + 1), 8 * spool.READ_AHEAD
    assert most <= kept + lead + 4 * 8 < 1432 / 4


READING = """
import sys, time
import numpy as np
from data.dataset import open_dataset
from data.staging.spool import Spool, opened_reader

def stop(spool, content=b""):
    spool._writer.stdin.write(content)
    spool._writer.stdin.flush()
    print(spool._writer.pid, spool.folder, flush=True)
    time.sleep(600)

if (sent := eval(sys.argv[2])) is not None:
    Spool._send = lambda spool, message: stop(spool, message[:sent])
with opened_reader(open_dataset(sys.argv[1]).train, np.arange(500), 64) as (_, spool):
    assert list(spool.folder.glob("*.tfrecord"))
    stop(spool)
"""


@pytest.mark.parametrize("sent", [0, 1, 20_000, -1, None])
def test_a_process_that_copies_ends_with_the_training(in_format, sent):
    """Whether it is killed while it reads, or before it has said what to copy, which is megabytes for large sets."""
    process = subprocess.Popen([sys.executable, "-c", READING, str(in_format("lmdb")), str(sent)], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pid, folder = process.stdout.readline().split()
    writer = psutil.Process(int(pid))
    process.kill()
    said = process.communicate()[1]
    writer.wait(300)
    assert not Path(folder).exists() and "Traceback" not in said


def test_a_process_that_copies_removes_all_when_nobody_listens(in_format, tmp_path):
    """A worker may be killed just before it is told that a file is there."""
    split = open_dataset(in_format("tfrecord")).train
    window = tmp_path / "window"
    window.mkdir()
    split = replace(split, window=Window(window / "train", 1 << 30, 1 << 20, 15, 0))
    layout = spool.Layout(split, np.arange(500), scratch_path(window), kept=64, room=1 << 20)
    with subprocess.Popen([sys.executable, "-m", "data.staging.spool_writer"], cwd=ROOT, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        writer.stdout.close()
        writer.stdin.write(pickle.dumps((layout, False)) + b"0 1\n")
        writer.stdin.flush()
        assert writer.stderr.read() == b"" and writer.wait() == 0
    assert not window.exists()


def is_writer(process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # a child of another test may be ending
        return "spool_writer" in " ".join(process.cmdline())
    return False


def test_a_process_that_is_killed_ends_the_training_with_a_line(in_format, small_files):
    with Feed(open_dataset(in_format("lmdb")), 32, AUGMENTATIONS["none"], 0).train(0, 179, 8, 8) as batches:
        next(batches)
        [writer] = [one for one in psutil.Process().children() if is_writer(one)]
        writer.kill()
        with pytest.raises(spool.SpoolEnded, match="that copies the samples for DALI ended with exit code -9"):
            for _ in range(178):
                next(batches)


def test_a_damaged_record_whose_name_is_not_utf8_is_named(tmp_path, monkeypatch):
    """The process that copies tells the training, through a pipe."""
    fill(tmp_path / "source", 4, classes=("cat", "dog"))
    (tmp_path / "source" / "dog" / "0 ü.jpg").rename(os.fsdecode(os.fsencode(tmp_path) + b"/source/dog/caf\xe9.jpg"))
    assert command(f"--source={tmp_path}/source", f"--output={tmp_path}/o", "--validation_fraction=0.25") == 0
    dataset = open_dataset(tmp_path / "o")
    split = next(split for split in (dataset.train, dataset.validation)
                 if any("caf" in split.source_name(sample) for sample in range(split.samples)))
    sample = next(sample for sample in range(split.samples) if "caf" in split.source_name(sample))
    offset, _ = split.entries[0][sample].tolist()
    with open(split.paths[0], "r+b") as file:
        file.seek(offset)
        file.write(bytes(8))  # its length
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")  # as in most languages, where this name is no text
    (tmp_path / "disk" / "window").mkdir(parents=True)
    split = replace(split, window=Window(tmp_path / "disk" / "window", 1 << 30, 1 << 20, 1, 0))
    with pytest.raises(spool.SpoolEnded, match=r"^dog/caf\\xe9.jpg in .*, record \d is not a TFRecord$"), \
            spool.opened_reader(split, np.arange(split.samples), 1):
        pass


@pytest.mark.parametrize("by", ORDERS)
def test_the_first_batch_of_several_workers_has_no_sample_twice(in_format, by):
    """Digits in LMDB, an evaluation every four epochs: a worker once read an epoch of its own, so 41 were left."""
    split = open_dataset(in_format("lmdb")).in_order(by).train
    made = plan(batch_size="128", epochs=8.0, evaluate_every=4, order=by)
    intervals = list(made.intervals())
    first, workers = intervals[0], 4
    assert [one.epoch for one in intervals if one.evaluates] == [4, 8]
    assert len(intervals) == (8 if by == "file" else 2)
    read = [order.worker_positions(split, first.steps, 128, shard, workers)[:32] for shard in range(workers)]
    assert len(np.unique(order.stream(split, 0, np.concatenate(read)))) == 128
