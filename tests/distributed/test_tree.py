"""The order of sums does not depend on how many workers share the terms."""
import itertools

import numpy as np
import pytest

from distributed import tree

TERMS = (1, 2, 3, 4, 6, 8, 9, 12, 15, 24, 34, 40, 64)


def numbers(terms, seed=0):
    """Float32 numbers whose sum depends on the order: over twelve orders of magnitude, and both zeros."""
    random = np.random.default_rng(seed)
    made = (random.normal(size=(terms, 500)) * 10.0 ** random.integers(-6, 6, (terms, 500))).astype(np.float32)
    made[:, :5] = np.where(random.random((terms, 5)) < 0.5, -0.0, 0.0)
    return made


def added(values):
    """The sum as the module's text describes it, from the top: the last level has the halves."""
    factor = next(one for one in (2, *range(3, len(values) + 1, 2)) if len(values) % one == 0) if len(values) > 1 else 1
    if factor != 2:  # an odd number: its largest prime factor is at the top
        factor = max(one for one in range(1, len(values) + 1) if len(values) % one == 0
                     and all(one % below for below in range(2, one)))
    if factor == 1:
        return values[0]
    size = len(values) // factor
    first, *others = [added(values[start:start + size]) for start in range(0, len(values), size)]
    for other in others:
        first = first + other
    return first


@pytest.mark.parametrize("terms", TERMS)
def test_any_number_of_workers_has_the_same_bits(terms):
    values = numbers(terms)
    expected = added(list(values))
    np.testing.assert_allclose(expected, values.astype(np.float64).sum(axis=0), rtol=1e-3, atol=1e-2)
    allowed = [workers for workers in range(1, terms + 1) if tree.is_subtree(terms, workers)]
    for workers in allowed:
        parts = []
        for part in np.split(values, workers):
            leaves = iter(part)
            [own] = tree.summed(lambda leaves=leaves: [next(leaves)], tree.branches(len(part)))
            parts.append(own)
        assert tree.total(parts).tobytes() == expected.tobytes(), workers


def test_the_order_matters_to_these_numbers():
    values = numbers(8)
    assert added(list(values)).tobytes() != sum(values[1:], values[0]).tobytes()


@pytest.mark.parametrize("terms", TERMS)
def test_a_loop_over_the_paths_adds_in_the_same_order(terms):
    values, levels = numbers(terms, seed=1), tree.branches(terms)
    kept = [None] * len(levels)
    for leaf, value in enumerate(values):
        lower, level = tree.path(leaf, levels)
        for one in lower:
            value = kept[one] + value
        if level < len(levels):
            kept[level] = value
    assert level == len(levels) and value.tobytes() == added(list(values)).tobytes()


def test_which_numbers_of_workers_can_share_a_tree():
    def numbers_of(terms):
        return [workers for workers in range(1, 20) if tree.is_subtree(terms, workers)]

    assert numbers_of(16) == [1, 2, 4, 8, 16] and numbers_of(12) == [1, 2, 4, 12] and numbers_of(3) == [1, 3]
    assert numbers_of(9) == [1, 3, 9] and numbers_of(15) == [1, 5, 15] and numbers_of(7) == [1, 7]
    assert tree.branches(34_816 // 16) == (17, 2, 2, 2, 2, 2, 2, 2)  # the batch of table 3, experiment 1
    for workers, terms in itertools.product((1, 2, 4, 8), (8, 24, 56, 2176)):
        assert tree.is_subtree(terms, workers)
