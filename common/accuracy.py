"""How certain an accuracy is: its 95 % interval, and whether it is better than guessing."""
import math

QUANTILE = 1.959964  # of the normal distribution, two-sided 95 %


def interval(accuracy: float, samples: int) -> tuple[float, float]:
    """Returns Wilson's 95 % confidence interval, from 0 to 1, of an accuracy that was measured on so many samples."""
    square = QUANTILE**2 / samples
    centre = accuracy + square / 2
    half = QUANTILE * math.sqrt(accuracy * (1 - accuracy) / samples + square / (4 * samples))
    low, high = (centre - half) / (1 + square), (centre + half) / (1 + square)
    return max(0.0, min(low, accuracy)), min(1.0, max(high, accuracy))  # rounding may leave the accuracy outside


def is_guessing(accuracy: float, samples: int, guess: float) -> bool:
    """Whether an accuracy is not certainly above that of always naming the most frequent class, `guess`.

    It is not if all samples are of one class, as in a folder of test images of a single one.
    """
    return interval(accuracy, samples)[0] <= guess < 1


def against_guessing(accuracy: float, samples: int, guess: float) -> str:
    """Returns in words that an accuracy is no better than guessing, or not certainly; "" if it certainly is."""
    if not is_guessing(accuracy, samples, guess):
        return ""
    return "not certainly better than guessing" if accuracy > guess else "no better than guessing"
