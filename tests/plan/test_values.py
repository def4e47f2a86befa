"""Values of flags that have a form of their own."""
import pytest

from plan.values import Every, range_of_steps


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
