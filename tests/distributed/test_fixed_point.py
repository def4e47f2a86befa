"""Sums in fixed point: the same bits in any order, at least as exact as float32, and never a number that is wrong."""
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf

from distributed.fixed_point import EXPONENT, FixedPoint

TERMS = (1, 2, 3, 8, 12, 64, 1000)


def numbers(terms, scale=1.0, seed=0):
    """Float32 numbers over many orders of magnitude, among them both zeros and whole rows of one sign."""
    random = np.random.default_rng(seed)
    made = random.normal(size=(terms, 4, 125)) * 10.0 ** random.integers(-6, 6, (terms, 4, 125)) * scale
    made[:, 0, :5] = np.where(random.random((terms, 5)) < 0.5, -0.0, 0.0)
    return made.astype(np.float32)


def total(values, terms=None, form=None) -> np.ndarray:
    form = form or FixedPoint(terms or len(values))
    summed = form.zero(values.shape[1:])
    for value in values:
        summed += form.term(tf.constant(value))
    return form.total(summed, values.shape[1:]).numpy()


@pytest.mark.parametrize("terms", TERMS)
def test_any_order_and_any_split_has_the_same_bits(terms):
    values, random = numbers(terms), np.random.default_rng(1)
    form, expected = FixedPoint(terms), total(values)
    assert total(values[random.permutation(terms)]).tobytes() == expected.tobytes()
    cut = int(random.integers(terms + 1))
    parts = [sum((form.term(tf.constant(one)) for one in part), form.zero(values.shape[1:]))
             for part in (values[:cut], values[cut:])]
    assert form.total(parts[1] + parts[0], values.shape[1:]).numpy().tobytes() == expected.tobytes()
    if terms > 2:
        assert sum(values[1:], values[0]).tobytes() != sum(values[-2::-1], values[-1]).tobytes()  # in float32


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("scale", [1.0, 1e3, 3e-10])
def test_the_error_is_at_most_that_of_float32(terms, scale):
    """Of each variable, against float64: gradients as at the beginning, huge, and at a training loss of 1e-6."""
    random = np.random.default_rng(2)
    values = (random.normal(size=(terms, 8, 500)) * scale * 10.0 ** random.uniform(-3, 1, (8, 1))).astype(np.float32)
    exact = values.astype(np.float64).sum(axis=0)
    errors = [np.linalg.norm(found - exact, axis=1) for found in (total(values), sum(values[1:], values[0]))]
    assert (errors[0] <= errors[1] * (1 + 1e-9)).all() if terms > 1 else not errors[0].any()
    assert (errors[0] <= 6e-8 * np.linalg.norm(exact, axis=1)).all()


def test_terms_that_are_as_large_as_can_be_do_not_wrap():
    values = np.full((4096, 2), np.nextafter(np.float32(2**EXPONENT), np.float32(0)))
    values[:, 1] *= -1
    found = total(values)
    np.testing.assert_allclose(found, values.astype(np.float64).sum(axis=0), rtol=1e-7)
    assert (found > 0).tolist() == [True, False]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 2.0**EXPONENT, -3e38])
def test_what_does_not_fit_makes_the_sum_of_its_tensor_nan(bad):
    values = np.ones((3, 5), np.float32)
    values[1, 2] = bad
    assert np.isnan(total(values)).all()
    values[1, 2] = -65_536
    assert total(values).tolist() == [3, 3, -65_534, 3, 3]


def test_a_hand_computed_term():
    """8 terms: 59 bits, so the first integer counts in units of 2**-27 and the second in units of 2**-87."""
    term = FixedPoint(8).term(tf.constant([1.5, -(2.0**-30)])).numpy()
    assert term.tolist() == [3 * 2**26, 0, 0, -(2**57), 0]


@pytest.mark.parametrize("terms", [*TERMS, 4096, 100_000])
def test_lossless_sums_are_rounded_once(terms):
    """Against Python's fractions: numbers of all magnitudes, which cancel, and the least and largest of float32."""
    random = np.random.default_rng(terms)
    values = (random.choice([-1, 1], (9, 40)) * 2.0 ** random.uniform(-126, 124, (9, 40))).astype(np.float32)
    values[3] = -values[5]
    values[0, :4] = np.finfo(np.float32).max, np.finfo(np.float32).tiny, 2.0**48, 65_536.0**2
    values[1:, :4] = 0
    exact = [sum(map(Fraction, column)) for column in values.T.tolist()]
    found = total(values, form=FixedPoint.lossless(max(terms, len(values))))
    np.testing.assert_allclose(found, np.array([*map(float, exact)]), rtol=6e-8)
    assert found[:4].tolist() == values[0, :4].tolist()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_only_what_is_not_finite_has_no_lossless_sum(bad):
    form = FixedPoint.lossless(3)
    assert np.isnan(total(np.array([[1, 2], [3, bad], [5, 6]], np.float32), form=form)).all()
    assert total(np.array([[1, 3e38], [3, -3e38], [5, 7]], np.float32), form=form).tolist() == [9, 7]


def test_subnormal_numbers_count_as_0_and_the_least_normal_one_to_its_last_digit():
    """Both as a term and as a sum of normal ones."""
    least = np.finfo(np.float32).tiny
    following = np.nextafter(least, np.float32(1))
    values = np.array([[1e-45, 1e-40, following, following], [3, 1e-40, 0, -least]], np.float32)
    assert total(values, form=FixedPoint.lossless(4096)).tolist() == [3, 0, float(following), 0]


def test_tensors_that_share_a_vector_have_the_bits_of_each_alone():
    """One of them is sparse. What does not fit makes all of its group NaN, and no other."""
    form, shapes, groups = FixedPoint(3), ([2, 3], [4], [], [5, 2]), [[1], [3, 0, 2]]
    random = np.random.default_rng(3)
    added = [[random.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(3)]
    sums = form.zeros(shapes, groups)
    for values in added:
        tensors = [*map(tf.constant, values)]
        tensors[3] = tf.IndexedSlices(values[3][::-1].copy(), tf.range(4, -1, -1), [5, 2])
        sums = [a + b for a, b in zip(sums, form.terms(tensors, groups), strict=True)]
    found = form.totals(sums, shapes, groups)
    assert [one.numpy().tobytes() for one in found] == [total(np.stack(alone)).tobytes() for alone in
                                                        zip(*added, strict=True)]
    assert [one.shape.as_list() for one in found] == [*shapes]
    bad = form.terms([tf.fill(shape, np.float32(np.nan if not shape else 1)) for shape in shapes], groups)
    assert [bool(np.isnan(one).all()) for one in form.totals(bad, shapes, groups)] == [True, False, True, True]
