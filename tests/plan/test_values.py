"""The values that flags take: bounds of numbers, and values that have a form of their own."""
import pytest

from common.errors import UsageError
from plan import flags, values
from plan.values import Every, range_of_steps

# (flags, the least value, one below it, the greatest value, one above it)
BOUNDS = (
    ("base_batch_size micro_batch_size dali_threads shuffle_block evaluate_every workers workers_per_node "
     "train_samples repeats patience", "1", "0", "1000000", None),
    ("max_rollbacks shuffle_group", "0", "-1", "1000000", None),
    ("validation_size", "1", "0", "4096", "4097"),
    ("seed", "0", "-1", "4294967295", "4294967296"),
    ("stop_below_expected", "0", "-1e-9", "100", "100.1"),
    ("last_gamma momentum label_smoothing batch_norm_momentum hw_decoder_load", "0", "-1e-9", "1", "1.0000001"),
    ("drop_path", "0", "-1e-9", "0.99", "0.9900001"),
    ("ema_decay", "0", "-1e-9", "0.999999999", "1"),
    ("mixup cutmix", "0", "-1e-9", "1000", "1000.1"),
    ("poly_power end_learning_rate warmup_epochs warmup_learning_rate weight_decay trust_coefficient lars_epsilon "
     "clip_norm", "0", "-1e-9", "1e30", None),
    ("epochs", "1e-9", "0", "100000", "100001"),
    ("fusion_mb", "0.001", "0.0009", "100000", "100001"),
    ("stage_gb", "0.001", "0.0009", "1000000", None),
    ("image_size", "1", "0", "4096", "4097"),
    ("batch_size batch_norm_span workers_schedule", "1", "0", "2147483647", "2147483648"),
    ("learning_rate", "0", "-1e-9", "1e30", "1.1e30"),
    ("class_weights", "0", "-1e-9", "1", "1.0000001"),
    ("validation_fraction", "0.001", "0.0009", "0.9", "0.9001"),
    ("loss_scale", "1", "0.9999", "16777216", "16777217"),
    ("target_top1", "1e-9", "0", "1", "1.0000001"))


def is_refused(name: str, value: str) -> bool:
    """Whether the value itself is. That another flag is missing or does not fit does not count."""
    try:
        flags.parse(["train.py", f"--{name}={value}", "--dry_run"])
    except UsageError as error:
        return f"--{name}={value}" in str(error)
    return False


@pytest.mark.parametrize("names, least, below, greatest, above", BOUNDS)
def test_the_ends_of_a_number_are_taken_and_what_lies_beyond_is_refused(names, least, below, greatest, above):
    for name in names.split():
        assert not is_refused(name, least) and not is_refused(name, greatest)
        assert is_refused(name, below) and (above is None or is_refused(name, above))


def test_every_number_with_bounds_is_among_them():
    by_parsing = (values.sizes, values.span, values.image_sizes, values.rates, values.loss_scale, values.fraction,
                  values.class_weights)
    bounded = {name for name, about in flags.FLAGS.items()
               if about.get("parse") in by_parsing or {about.get("low"), about.get("high")} != {None}}
    assert bounded == {name for names, *_ in BOUNDS for name in names.split()}


def test_class_weights_have_names():
    assert [values.class_weights(text) for text in ("none", "0.5", "balanced")] == [0, 0.5, 1]


def test_minutes_are_counted_in_seconds():
    every = Every.parse("2m")
    assert every.has_passed(120) and not every.has_passed(119)


def test_epochs_are_due_at_their_multiples():
    """Every half epoch of 100 samples: between positions 49 and 50, and not again before 100."""
    every = Every.parse("0.5")
    assert every.is_due(49, 50, 100) and not every.is_due(50, 99, 100) and every.is_due(50, 100, 100)


@pytest.mark.parametrize("text", ["100", "100:", ":110", "110:100", "100:100", "a:110", "100:b", "-1:5"])
def test_what_is_no_range_of_steps_is_refused(text):
    with pytest.raises(ValueError, match="is not a range of steps"):
        range_of_steps(text)


def test_a_range_of_steps():
    assert range_of_steps("100:110") == (100, 110)
