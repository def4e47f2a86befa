"""What DALI delivers: each sample once, in the order that was asked for, with the right pixels and labels."""
import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from test_digits import record_label

from data import order
from data.dataset import open_dataset
from data.feed import Feed
from data.pipeline import AUGMENTATIONS


@pytest.fixture(scope="module", params=["digits", "odd_digits"])
def dataset(request):
    return open_dataset(request.getfixturevalue(request.param))


def pixels(split, sample):
    """A sample's image as Pillow decodes it, float32 (32, 32, 3)."""
    file = np.searchsorted(split.file_starts, sample, side="right") - 1
    offset, size = split.index[sample]
    record = split.paths[file].read_bytes()[offset:offset + size]
    jpeg = record[record.index(b"\xff\xd8"):record.rindex(b"\xff\xd9") + 2]
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"), np.float32)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
def test_an_epoch_holds_each_sample_once_over_all_shards(dataset, shards):
    split = dataset.train
    steps = split.samples // (5 * shards)
    parts = [order.worker_stream(split, 7, 0, steps, 5 * shards, shard, shards) for shard in range(shards)]
    counts = Counter(np.concatenate(parts).tolist())
    assert max(counts.values()) == 1 and split.samples - len(counts) < 5 * shards  # but for the tail
    assert sorted(order.stream(split, 7, 0, split.samples).tolist()) == list(range(split.samples))


def test_global_batches_do_not_depend_on_the_number_of_shards(dataset):
    alone = order.worker_stream(dataset.train, 7, 1000, 20, 60, 0, 1).reshape(20, 60)
    for shards in (2, 3, 5):
        parts = [order.worker_stream(dataset.train, 7, 1000, 20, 60, shard, shards).reshape(20, -1)
                 for shard in range(shards)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), alone)


def test_the_stream_goes_on_from_any_position(dataset):
    whole = order.stream(dataset.train, 3, 0, 4000)
    for position in (0, 1, 1436, 1437, 2000):
        np.testing.assert_array_equal(order.stream(dataset.train, 3, position, 1500), whole[position:position + 1500])
    assert (whole[:1437] != whole[1437:2874]).any()


def test_dali_reads_the_stream_with_its_pixels_and_labels(dataset):
    """`none` on images of the right size changes nothing but the scale: compare with Pillow."""
    split, feed = dataset.train, Feed(dataset, 32, "none", seed=5, shard=1, shards=2)
    samples = order.worker_stream(split, 5, 1400, 3, 64, 1, 2)
    with feed.train(1400, 3, 64, 16) as batches:
        got = [next(batches) for _ in range(6)]
    images = np.concatenate([batch[0].numpy() for batch in got])
    labels = np.concatenate([batch[1].numpy() for batch in got]).ravel()
    expected = np.stack([pixels(split, sample) for sample in samples])
    np.testing.assert_allclose(images * dataset.std + dataset.mean, expected, atol=1.01)  # two JPEG decoders
    files = np.searchsorted(split.file_starts, samples, side="right") - 1
    np.testing.assert_array_equal(labels, [record_label(split.paths[file], *split.index[sample])
                                           for file, sample in zip(files, samples, strict=True)])


def test_a_gentle_crop_varies_and_repeats_with_the_seed(dataset):
    def first(seed, position=0):
        with Feed(dataset, 32, "crop", seed).train(position, 1, 32, 32) as batches:
            return next(batches)[0].numpy()

    with Feed(dataset, 32, "none", 1).train(0, 1, 32, 32) as batches:
        plain = next(batches)[0].numpy()
    np.testing.assert_array_equal(first(1), first(1))
    assert np.abs(first(1) - plain).mean() > 0.05
    assert np.abs(first(1) - plain).mean() < 1.0  # still the same digits


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_validation_counts_each_sample_once(dataset, shards):
    labels, total = [], 0
    for shard in range(shards):
        with Feed(dataset, 32, "none", 0, shard, shards).validation(64) as (batches, samples):
            got = [next(batches)[1].numpy().ravel() for _ in range(-(-samples // 64))]
            labels += np.concatenate(got)[:samples].tolist()
            total += samples
    split = dataset.validation
    assert total == split.samples
    assert labels == [record_label(split.paths[0], *entry) for entry in split.index]


def test_more_shards_than_samples(dataset):
    with Feed(dataset, 32, "none", 0, shard=0, shards=10000).validation(64) as (batches, samples):
        assert samples == 0 and list(batches) == []


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_every_augmentation_delivers_normalised_batches_and_varies(digits, name):
    opened = open_dataset(digits)
    with Feed(opened, 24, name, seed=1).train(0, 2, 64, 64) as batches:
        images = next(batches)[0].numpy()
    with Feed(opened, 24, name, seed=1).validation(64) as (batches, _):
        validation = next(batches)[0].numpy()
    for batch in (images, validation):
        assert batch.shape == (64, 24, 24, 3) and np.isfinite(batch).all() and batch.std() > 0.3
    if name != "none":
        with Feed(opened, 24, name, seed=2).train(0, 2, 64, 64) as batches:
            assert np.abs(next(batches)[0].numpy() - images).mean() > 0.05


def test_a_flip_mirrors_half_of_the_images(digits):
    """alexnet's crop at the image's own size leaves the flip alone to vary: each image is itself or its mirror."""
    opened = open_dataset(digits)
    split, enlarged = opened.train, round(28 * 256 / 227)
    assert enlarged == 32
    samples = order.worker_stream(split, 1, 0, 1, 256, 0, 1)
    with Feed(opened, 28, "alexnet", seed=1).train(0, 1, 256, 256) as batches:
        images = next(batches)[0].numpy() * opened.std + opened.mean
    mirrored = 0
    for image, sample in zip(images, samples, strict=True):
        whole = pixels(split, sample)
        windows = [whole[y:y + 28, x:x + 28] for y in range(5) for x in range(5)]
        straight, flipped = (min(np.abs(image - window[:, ::step]).mean() for window in windows) for step in (1, -1))
        assert min(straight, flipped) < 1.5
        mirrored += flipped < straight
    assert 90 < mirrored < 166  # 128 expected, deviation 8
