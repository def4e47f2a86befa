"""How certain an accuracy is: the interval against SciPy's, and what is called guessing."""
import pytest
from scipy.stats import binomtest

from common.accuracy import against_guessing, interval


@pytest.mark.parametrize(("hits", "samples"), [(7, 7), (0, 5), (356, 360), (107, 1000), (1, 2), (37_950, 50_000)])
def test_the_interval_is_wilsons(hits, samples):
    expected = binomtest(hits, samples).proportion_ci(0.95, "wilson")
    assert interval(hits / samples, samples) == pytest.approx((expected.low, expected.high), abs=1e-6)


@pytest.mark.parametrize(("accuracy", "samples", "guess", "says"), [
    (0.107, 1000, 0.1, "not certainly better than guessing"), (0.13, 1000, 0.1, ""), (1.0, 7, 4 / 7, ""),
    (1.0, 2, 0.5, "not certainly better than guessing"), (0.42, 50, 0.34, "not certainly better than guessing"),
    (0.34, 50, 0.34, "no better than guessing"), (0.1, 50, 0.34, "no better than guessing"),
    (1.0, 20, 1.0, ""), (0.4, 20, 1.0, "")])  # images of one class: nothing to guess
def test_guessing_is_called_so(accuracy, samples, guess, says):
    assert against_guessing(accuracy, samples, guess) == says
