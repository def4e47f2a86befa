"""Uses of a seed: each has random numbers of its own."""
import itertools

import numpy as np

from data import order, randomness
from data.augmentation import AUGMENTATIONS, mirrored_in_turn, random_numbers
from data.dataset import Split
from data.mixing import Mixing
from data.randomness import Purpose

SAMPLES = 20_000


def test_mixing_and_augmentation_are_uncorrelated():
    """Each column of one with each of the other, of the same samples and of those whose numbers begin together."""
    positions = np.arange(SAMPLES)
    mixed = Mixing(mixup=1.0).random_numbers(32, 5, np.arange(4 * SAMPLES))
    augmented = np.concatenate([random_numbers(AUGMENTATIONS[name], 32, 5, positions)
                                for name in ("nnabla", "resnet")], axis=1)
    augmented = augmented[:, augmented.std(axis=0) > 0]
    for stride in (1, 2, 4):
        correlations = np.corrcoef(mixed[::stride][:SAMPLES, 0], augmented, rowvar=False)[0, 1:]
        assert np.abs(correlations).max() < 6 / SAMPLES ** 0.5, stride


def test_no_two_uses_draw_the_same_numbers(monkeypatch):
    """The first bits of every generator that is made for three seeds and five epochs."""
    made, philox = [], np.random.Philox

    def recorded(*arguments, **options):
        bits = philox(*arguments, **options)
        made.append(tuple(philox(*arguments, **options).random_raw(4)))
        return bits

    monkeypatch.setattr(randomness.np.random, "Philox", recorded)
    split, positions = Split("tfrecord", ("one",), (64,)), np.arange(4)
    for seed in range(3):
        for epoch in range(5):
            order.permutation(split, seed, epoch)
            order.permutation(split, seed, epoch, block=4, group=2)
        for name in ("nnabla", "resnet"):
            random_numbers(AUGMENTATIONS[name], 32, seed, positions)
        Mixing(0.4, 1.0).random_numbers(32, seed, positions)
        mirrored_in_turn(64, seed, positions, positions)
    assert len(set(made)) == 3 * (5 * 3 + 5) == len(made) - 3  # nnabla and resnet share AUGMENTATION


def test_purposes_are_distinct():
    assert len({int(purpose) for purpose in Purpose.__members__.values()}) == len(Purpose.__members__)
    keys = {tuple(randomness.philox(seed, purpose, epoch).random_raw(2))
            for seed, epoch, purpose in itertools.product((0, 1, 2**32 - 1), range(20), Purpose)}
    assert len(keys) == 3 * 20 * len(Purpose)
