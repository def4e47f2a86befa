"""What an accuracy is worth: how far chance may have moved it, and whether guessing does as well."""
import math

QUANTILE = 1.959964  # of the normal distribution, two-sided 95 %


def interval(accuracy: float, samples: int) -> tuple[float, float]:
    """Returns the bounds of Wilson's 95 % interval of an accuracy that was measured on so many samples, from 0 to 1."""
    square = QUANTILE**2 / samples
    centre = accuracy + square / 2
    half = QUANTILE * math.sqrt(accuracy * (1 - accuracy) / samples + square / (4 * samples))
    return max(0.0, (centre - half) / (1 + square)), min(1.0, (centre + half) / (1 + square))  # but for rounding


def in_words(accuracy: float, samples: int) -> str:
    low, high = interval(accuracy, samples)
    return f"95% interval {low:.1%} to {high:.1%}"


def is_guessing(accuracy: float, samples: int, guess: float) -> bool:
    """Whether an accuracy may be one of guessing. guess: that of always naming the most frequent class."""
    return interval(accuracy, samples)[0] <= guess
