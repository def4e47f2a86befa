"""What DALI delivers: each sample once, in the order that was asked for, with the right pixels and labels."""
import io
import tempfile
from collections import Counter

import numpy as np
import pytest
from conftest import run
from PIL import Image

from common import files
from data import formats, order
from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from tests.rigs.making import record

BY_FILE = [f"{name} by file" for name in formats.FORMATS if not formats.get(name).ANY_ORDER]


@pytest.fixture(scope="module", params=[*formats.FORMATS, *BY_FILE])
def dataset(request, in_format):
    name, *by_file = request.param.split(maxsplit=1)
    return open_dataset(in_format(name)).in_order("file" if by_file else "global")


@pytest.fixture(scope="module")
def one_file(digits):
    return open_dataset(digits)


def decode(image):
    """As Pillow decodes it, float32 (32, 32, 3)."""
    return np.asarray(Image.open(io.BytesIO(image)).convert("RGB"), np.float32)


def parts(split, position, steps, batch_size, shards, seed=7):
    """What each shard reads."""
    stream = order.stream(split, seed, position + np.arange(steps * batch_size))
    return [stream[order.worker_positions(split, steps, batch_size, shard, shards)] for shard in range(shards)]


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
def test_an_epoch_holds_each_sample_once_over_all_shards(dataset, shards):
    split = dataset.train
    steps = split.samples // (5 * shards)
    counts = Counter(np.concatenate(parts(split, 0, steps, 5 * shards, shards)).tolist())
    assert max(counts.values()) == 1 and split.samples - len(counts) < 5 * shards  # but for the tail
    assert sorted(order.stream(split, 7, np.arange(split.samples)).tolist()) == list(range(split.samples))
    second = order.stream(split, 7, split.samples + np.arange(split.samples))
    assert sorted(second.tolist()) == list(range(split.samples))


def test_micro_batches_by_hand():
    """Of eight for four workers, pairs that share batch norm take two each, in turn. Five for two are 2 and 3."""
    assert [[*order.micro_batches(32, 4, shard, 4, neighbours=2)] for shard in range(4)] == [
        [0, 2], [1, 3], [4, 6], [5, 7]]
    assert [[*order.micro_batches(20, 4, shard, 2)] for shard in range(2)] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
def test_the_shards_of_every_interval_are_its_slice_of_the_stream(dataset, shards):
    """Interval after interval, of changing batches: what all read together is the stream, no less, no more."""
    split, position = dataset.train, 0
    for steps, batch in ((11, 60), (12, 60), (1, 120), (7, 120), (40, 60)):
        together = np.concatenate(parts(split, position, steps, batch, shards))
        stream_slice = order.stream(split, 7, position + np.arange(steps * batch))
        assert sorted(together.tolist()) == sorted(stream_slice.tolist())
        position += steps * batch


@pytest.mark.parametrize("name", formats.FORMATS)
def test_global_batches_do_not_depend_on_the_number_of_shards(in_format, name):
    split = open_dataset(in_format(name)).train
    single = parts(split, 1000, 20, 60, 1)[0].reshape(20, 60)
    for shards in (2, 3, 5):
        together = [part.reshape(20, -1) for part in parts(split, 1000, 20, 60, shards)]
        np.testing.assert_array_equal(np.concatenate(together, axis=1), single)


UPLOAD = """
import sys
import numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from tests.rigs.making import record
from data.pipeline import DecoderSettings

def batches(device):
    with Feed(open_dataset(sys.argv[1]), 8, AUGMENTATIONS["crop"], 0, device=device).train(0, 5, 64, 32) as found:
        step = tf.function(lambda iterator: next(iterator), autograph=False)
        return [step(found.iterator) if number % 2 else next(found) for number in range(10)]

for ours, theirs in zip(batches(DecoderSettings(upload="/cpu:1")), batches(DecoderSettings()), strict=True):
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    print([tensor.device[-5:] for tensor in ours], [tensor.device[-5:] for tensor in theirs])
"""


def test_batches_from_a_cpu_wait_on_the_models_device(digits):
    """A second device of the CPU stands for the GPU. In a step, where a tensor is shows in the iterator's own place."""
    done = run("python", 1, "-c", UPLOAD, digits)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "['CPU:1', 'CPU:1'] ['CPU:0', 'CPU:0']" and len(lines) == 10


def test_the_stream_goes_on_from_any_position(dataset):
    expected = order.stream(dataset.train, 3, np.arange(4000))
    for position in (0, 1, 1436, 1437, 2000):
        found = order.stream(dataset.train, 3, position + np.arange(1500))
        np.testing.assert_array_equal(found, expected[position:position + 1500])
    assert (expected[:1437] != expected[1437:2874]).any()


@pytest.mark.parametrize("group", [0, 4])
@pytest.mark.parametrize("repeats", [2, 3])
def test_an_epoch_takes_the_first_samples_of_its_permutation_several_times(in_format, repeats, group):
    """Two by two, a b a b a b, cut where an epoch without copies ends; 1,437 is neither a multiple of 6 nor even."""
    split, expected = open_dataset(in_format("tfrecord")).train, []
    for epoch in range(2):
        pairs = zip(*[iter(order.permutation(split, 3, epoch, 64, group).tolist())] * 2, strict=False)
        expected += [sample for pair in pairs for sample in repeats * pair][:1437]
    for start, end in ((0, 2874), (5, 40), (1430, 2000)):
        found = order.stream(split, 3, np.arange(start, end), 64, group, repeats)
        assert found.tolist() == expected[start:end]
    counts = Counter(expected[:1437])
    assert abs(len(counts) - 1437 / repeats) < 2 and Counter(counts.values())[repeats] >= len(counts) - 2


@pytest.mark.parametrize("block", [1, 5, 64, 1000])
def test_a_block_has_samples_of_one_file(in_format, block):
    split = open_dataset(in_format("tfrecord")).train
    found = order.permutation(split, 3, 1, block)
    assert sorted(found.tolist()) == list(range(1437))
    files = np.searchsorted(split.file_starts, found, side="right")
    # A file's last block may be shorter, so runs end at its blocks: never more of them than the files' blocks.
    blocks = sum(-(-size // block) for size in split.file_samples)
    runs = 1 + np.count_nonzero(np.diff(files))
    assert runs <= blocks and (runs > blocks / 3 or block == 1000)
    feed = Feed(open_dataset(in_format("tfrecord")), 32, AUGMENTATIONS["none"], 3, shuffle_block=block)
    assert feed.prepare([(1437, 10)], 64, 64).samples.tolist() == found[:640].tolist()


@pytest.mark.parametrize("shards", [1, 3])
def test_dali_delivers_each_sample_once_over_an_epoch(dataset, shards):
    """The images themselves, as a multiset, against what Pillow decodes."""
    split, batch = dataset.train, 60
    steps, got = split.samples // batch, Counter()
    for shard in range(shards):
        feed = Feed(dataset, 32, AUGMENTATIONS["none"], 5, shard, shards)
        with feed.train(0, steps, batch, batch // shards) as batches:
            for _ in range(steps):
                got.update(image.tobytes() for image in next(batches)[0].numpy())
    samples = order.stream(split, 5, np.arange(steps * batch))
    assert len(set(samples.tolist())) == steps * batch == 1380
    assert got == Counter(decode(record(split, sample)[0]).astype(np.uint8).tobytes() for sample in samples)


def test_dali_reads_the_stream_with_its_pixels_and_labels(dataset):
    """`none` on images of the right size changes nothing: compare with Pillow."""
    split, feed = dataset.train, Feed(dataset, 32, AUGMENTATIONS["none"], seed=7, shard=1, shards=2)
    samples = parts(split, 1400, 3, 64, 2)[1]  # over the end of an epoch
    with feed.train(1400, 3, 64, 16) as batches:
        got = [next(batches) for _ in range(6)]
    images, labels = (np.concatenate([batch[part].numpy() for batch in got]) for part in (0, 1))
    assert images.dtype == np.uint8
    expected = [record(split, sample) for sample in samples]
    np.testing.assert_allclose(images, [decode(image) for image, _ in expected], atol=1)  # two JPEG decoders
    np.testing.assert_array_equal(labels.ravel(), [label for _, label in expected])


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_pipeline_opened_anywhere_goes_on_exactly(one_file, name):
    """Pixels and all, however far it is opened from where it was, and whatever the number of workers."""
    def images(position, steps, shard=0, shards=1):
        feed = Feed(one_file, 24, AUGMENTATIONS[name], 3, shard, shards)
        with feed.train(position, steps, 64, 64 // shards) as batches:
            return np.stack([next(batches)[0].numpy() for _ in range(steps)])

    expected = images(1300, 6)
    np.testing.assert_array_equal(images(1300 + 64 * 4, 2), expected[4:])
    np.testing.assert_array_equal(np.concatenate([images(1300, 6, shard, 2) for shard in (0, 1)], axis=1), expected)


@pytest.mark.parametrize("shards", [1, 3])
def test_validation_counts_each_sample_once(dataset, shards):
    labels, total = [], 0
    for shard in range(shards):
        with Feed(dataset, 32, AUGMENTATIONS["none"], 0, shard, shards).validation(64) as (batches, samples):
            got = [next(batches)[1].numpy().ravel() for _ in range(-(-samples // 64))]
            labels += np.concatenate(got)[:samples].tolist()
            total += samples
    assert total == dataset.validation.samples == 353
    assert labels == [record(dataset.validation, sample)[1] for sample in range(353)]


def test_what_a_killed_process_has_left_is_removed(one_file, tmp_path, monkeypatch):
    """Index files, on disk and in memory; nothing of this process stays there either, before the pipeline is closed."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    for place in (memory, disk):
        (place / "bigbatch-scratch-killed").mkdir(parents=True)
    monkeypatch.setattr(files, "MEMORY", str(memory))
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    with Feed(one_file, 32, AUGMENTATIONS["crop"], 0).train(0, 2, 64, 64) as batches:
        next(batches)
        assert list(memory.iterdir()) == list(disk.iterdir()) == []


def test_more_shards_than_samples(one_file):
    with Feed(one_file, 32, AUGMENTATIONS["none"], 0, shard=0, shards=10000).validation(64) as (batches, samples):
        assert samples == 0 and list(batches) == []


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_every_augmentation_varies_with_the_seed(one_file, name):
    opened = one_file
    with Feed(opened, 24, AUGMENTATIONS[name], seed=1).train(0, 2, 64, 64) as batches:
        images = next(batches)[0].numpy()
    with Feed(opened, 24, AUGMENTATIONS[name], seed=1).validation(64) as (batches, _):
        validation = next(batches)[0].numpy()
    for batch in (images, validation):
        assert batch.shape == (64, 24, 24, 3) and batch.dtype == np.uint8 and batch.std() > 20
    if name != "none":
        with Feed(opened, 24, AUGMENTATIONS[name], seed=2).train(0, 2, 64, 64) as batches:
            assert np.abs(next(batches)[0].numpy() - images.astype(float)).mean() > 4


def test_a_flip_mirrors_half_of_the_images(digits):
    """alexnet's crop at the image's own size leaves the flip alone to vary: each image is itself or its mirror."""
    opened = open_dataset(digits)
    split = opened.train
    assert round(32 / (256 / 227)) == 28
    samples = order.stream(split, 1, np.arange(256))
    with Feed(opened, 28, AUGMENTATIONS["alexnet"], seed=1).train(0, 1, 256, 256) as batches:
        images = next(batches)[0].numpy().astype(float)
    mirrored = 0
    for image, sample in zip(images, samples, strict=True):
        expected = decode(record(split, sample)[0])
        windows = [expected[y:y + 28, x:x + 28] for y in range(5) for x in range(5)]
        straight, flipped = (min(np.abs(image - window[:, ::step]).mean() for window in windows) for step in (1, -1))
        assert min(straight, flipped) < 1.5
        mirrored += flipped < straight
    assert 90 < mirrored < 166  # 128 expected, deviation 8


@pytest.mark.parametrize("shards", [1, 2])
def test_a_slice_opened_further_on_gives_what_comes_next(dataset, shards):
    """Images and labels, with random crops: a resumed run reads what the one before it would have read."""
    for shard in range(shards):
        feed = Feed(dataset, 24, AUGMENTATIONS["crop"], 7, shard, shards)
        with feed.train(1300, 6, 12, 6) as batches:  # across an epoch's end
            expected = [next(batches) for _ in range(12 // shards)]
        with feed.train(1300, 6, 12, 6, skip=3) as batches:
            for images, labels in expected[6 // shards:]:
                again, theirs = next(batches)
                np.testing.assert_array_equal(again, images)
                np.testing.assert_array_equal(theirs, labels)
