"""Schedules at epochs computed by hand from the papers' formulas."""
import pytest

from optim.schedules import LearningRate, Piecewise, momentum_at, scaled


def rate(text, epochs=90, **options):
    return LearningRate(Piecewise.parse(text), epochs, **options)


CONFIGURATION_A = rate("34", warmup="gradual", warmup_epochs=34, warmup_learning_rate=1e-5, decay_from="warmup_end")
CONFIGURATION_B = rate("0:29,30:50", warmup="gradual", warmup_epochs=5, warmup_learning_rate=0.2)


@pytest.mark.parametrize(("schedule", "epoch", "expected"), [
    (rate("6.4"), 0, 6.4), (rate("6.4"), 45, 1.6), (rate("6.4"), 90, 0.0),
    (rate("1", power=1.0), 30, 2 / 3),
    (rate("2", decay="cosine"), 45, 1.0), (rate("2", decay="cosine"), 30, 1.5), (rate("2", decay="cosine"), 90, 0.0),
    (rate("3.2", decay="multistep", boundaries=(30, 60, 80)), 29.9, 3.2),
    (rate("3.2", decay="multistep", boundaries=(30, 60, 80)), 30, 0.32),
    (rate("3.2", decay="multistep", boundaries=(30, 60, 80)), 85, 0.0032),
    (rate("0.1", decay="constant"), 89, 0.1),
    (rate("3.2", warmup="gradual", warmup_epochs=5, warmup_learning_rate=0.1, decay="constant"), 2.5, 1.65),
    (rate("3.2", warmup="constant", warmup_epochs=5, warmup_learning_rate=0.1, decay="constant"), 4.9, 0.1),
    (rate("3.2", warmup="constant", warmup_epochs=5, warmup_learning_rate=0.1, decay="constant"), 5, 3.2),
    (CONFIGURATION_A, 0, 1e-5), (CONFIGURATION_A, 34, 34.0), (CONFIGURATION_A, 62, 8.5), (CONFIGURATION_A, 90, 0.0),
    (CONFIGURATION_B, 0, 0.2), (CONFIGURATION_B, 2.5, 14.6), (CONFIGURATION_B, 5, 29 * (85 / 90) ** 2),
    (CONFIGURATION_B, 29.999999, 29 * (60 / 90) ** 2), (CONFIGURATION_B, 30, 50 * (60 / 90) ** 2),
    (CONFIGURATION_B, 60, 50 / 9),
])
def test_rate_at(schedule, epoch, expected):
    assert schedule(epoch) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_configuration_a_is_continuous_where_warm_up_ends():
    assert CONFIGURATION_A(34 - 1e-9) == pytest.approx(CONFIGURATION_A(34), rel=1e-6)


@pytest.mark.parametrize(("schedule", "peak"), [
    (rate("6.4"), 6.4), (CONFIGURATION_A, 34.0), (CONFIGURATION_B, 29.0),
    (rate("0:29,30:50", decay="constant"), 50.0),
    (rate("5", epochs=1, warmup="gradual", warmup_epochs=2), 2.5),  # ends in the middle of its warm-up
])
def test_peak(schedule, peak):
    assert schedule.peak == peak


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.2), ("linear", 6.4), ("sqrt", 0.2 * 32 ** 0.5)])
def test_scaling_from_256_to_8192(rule, expected):
    assert scaled(Piecewise.parse("0.2"), rule, 256, 8192)(0) == pytest.approx(expected)


@pytest.mark.parametrize(("batch", "momentum"), [(32768, 0.9), (16384, 0.95), (65536, 0.8), (55296, 0.83125)])
def test_momentum_from_the_noise_scale(batch, momentum):
    assert momentum_at("noise_scale", 0.9, batch) == pytest.approx(momentum)
    assert momentum_at("constant", 0.9, batch) == 0.9


def test_a_batch_that_leaves_no_momentum_is_an_error():
    """1 - (1 - 0.5) * 65536 / 32768 is exactly 0."""
    assert momentum_at("noise_scale", 0.5, 65535) == pytest.approx(0.5 / 32768)
    for batch in (65536, 65537):
        with pytest.raises(ValueError, match=f"no positive momentum at batch size {batch}"):
            momentum_at("noise_scale", 0.5, batch)


@pytest.mark.parametrize("text", ["", "a", "1:2", "0:1,0:2", "0:1,5", "0:1,9:2,3:4", "0:1:2", "1,2"])
def test_malformed_pairs(text):
    with pytest.raises(ValueError):
        Piecewise.parse(text)
