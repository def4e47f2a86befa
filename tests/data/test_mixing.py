"""Mixup and CutMix: the random numbers against their distribution, the images against NumPy, pairs on any shards."""
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from data.mixing import COLUMNS, Mixing, label_weight, mixed, partners


def rows(mixing, count=20_000, size=32, seed=5, start=0):
    return mixing.random_numbers(size, seed, start + np.arange(count))


def test_pairs_share_their_numbers_which_depend_on_seed_and_position_alone():
    mixing = Mixing(0.4, 1.0)
    everything = rows(mixing, 400)
    np.testing.assert_array_equal(everything[::2], everything[1::2])
    assert len(np.unique(everything[::2], axis=0)) == 200
    some = np.array([20, 21, 6, 7, 398, 399])
    np.testing.assert_array_equal(mixing.random_numbers(32, 5, some), everything[some])
    np.testing.assert_array_equal(mixing.random_numbers(32, 5, 13 + np.arange(50)),
                                  mixing.random_numbers(32, 5, 3 + np.arange(10, 60)))  # a pair can start anywhere
    assert (rows(mixing, 400, seed=6) != everything).any(axis=1).mean() > 0.99


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_the_weight_of_mixup_is_beta_distributed(alpha):
    drawn = rows(Mixing(mixup=alpha))[::2]
    np.testing.assert_array_equal(drawn[:, 0], drawn[:, 1])
    assert not drawn[:, 2:].any()
    assert stats.kstest(drawn[:, 0], stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_the_rectangle_of_cutmix():
    drawn = rows(Mixing(cutmix=1.0))[::2]
    _, label, top, left, bottom, right = drawn.T
    assert (drawn[:, 0] == 1).all() and drawn[:, 2:].min() == 0 and drawn[:, 2:].max() == 32
    np.testing.assert_allclose(label, 1 - (bottom - top) * (right - left) / 32 ** 2, atol=1e-6)
    # Unclipped rectangles are squares whose area is uniform, because Beta(1, 1) is.
    inner = (top > 0) & (left > 0) & (bottom < 32) & (right < 32) & (bottom > top)
    assert (bottom - top == right - left)[inner].all()
    # The centre is uniform over the image, so a side longer than s keeps s with the probability 1 - s / 32 or so.
    middle = (top + bottom)[inner] / 2
    assert middle.mean() == pytest.approx(16, abs=0.2)


def test_both_are_used_alike():
    drawn = rows(Mixing(0.4, 1.0))[::2]
    assert (drawn[:, 2:].any(axis=1)).mean() == pytest.approx(0.5, abs=0.03)


def test_mixed_images_against_numpy():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (6, 8, 10, 3)).astype(np.uint8)
    numbers = np.zeros((6, len(COLUMNS)), np.float32)
    numbers[0:2] = [0.25, 0.25, 0, 0, 0, 0]  # mixup
    numbers[2:4] = [1.0, 1 - 3 * 4 / 80, 2, 5, 5, 9]  # rows 2 to 4, columns 5 to 8
    numbers[4:6] = [1.0, 1.0, 3, 3, 3, 7]  # an empty rectangle
    found = mixed(tf.constant(images), tf.constant(numbers)).numpy()
    expected = images.astype(np.float64)
    expected[0] = 0.25 * images[0] + 0.75 * images[1]
    expected[1] = 0.25 * images[1] + 0.75 * images[0]
    expected[2, 2:5, 5:9], expected[3, 2:5, 5:9] = images[3, 2:5, 5:9], images[2, 2:5, 5:9]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert partners(tf.constant([0, 1, 2, 3])).numpy().tolist() == [1, 0, 3, 2]
    np.testing.assert_allclose(label_weight(tf.constant(numbers)), [0.25, 0.25, 0.85, 0.85, 1, 1], atol=1e-6)


def test_every_number_of_shards_mixes_the_same_pairs(digits):
    """Eight global batches of 24: on one shard, on two and on three, with the pairs' own bits."""
    def pairs(shards, micro_batch_size):
        feed = Feed(open_dataset(digits), 16, AUGMENTATIONS["none"], seed=3, shards=shards, mixing=Mixing(0.4, 1.0))
        found = set()
        for shard in range(shards):
            with dataclasses.replace(feed, shard=shard).train(7, 8, 24, micro_batch_size) as batches:
                for _ in range(8 * 24 // shards // micro_batch_size):
                    images, _, numbers = next(batches)
                    both = mixed(images, numbers).numpy().reshape(-1, 2 * 16 * 16 * 3)
                    found |= {pair.tobytes() for pair in both}
        return found

    alone = pairs(1, 8)
    assert len(alone) == 96
    assert pairs(2, 12) == alone and pairs(3, 4) == alone


@pytest.mark.parametrize(("position", "shards", "size"), [(0, 1, 48), (1437, 2, 8), (41_673, 3, 4)])
def test_copies_of_an_image_are_augmented_anew_and_never_mixed_with_each_other(digits, position, shards, size):
    """Two epochs of 1,437 samples from a position that is even, odd, or amid an epoch: pairs lie across their ends."""
    feed = Feed(open_dataset(digits), 16, AUGMENTATIONS["crop"], seed=3, mixing=Mixing(0.4, 1.0), repeats=3)
    made = [dataclasses.replace(feed, shard=shard, shards=shards).prepare([(position, 59)], 48, size)
            for shard in range(shards)]
    pairs = np.concatenate([one.samples for one in made]).reshape(-1, 2)
    assert (pairs[:, 0] != pairs[:, 1]).all() and 2 * 479 <= len(np.unique(pairs)) + 200 < 1437
    seen = [(sample, row.tobytes()) for one in made for sample, row in zip(one.samples, one.numbers, strict=True)]
    assert len({*seen}) == len(seen) == 59 * 48


def test_validation_is_not_mixed(digits):
    feed = Feed(open_dataset(digits), 16, AUGMENTATIONS["none"], seed=3, mixing=Mixing(0.4))
    with feed.validation(8) as (batches, _):
        assert len(next(batches)) == 2
