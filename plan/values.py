"""The values of flags that have a form of their own: schedules, intervals, ranges. Parsing raises ValueError."""
import contextlib
import math
from dataclasses import dataclass

from common import own
from optim.schedules import Piecewise


@dataclass(frozen=True)
class Every:
    """How often something is done: `1` or `0.5`, epochs; `10m`, minutes; `auto`, each epoch, at most once a minute."""

    epochs: float = math.inf
    minutes: float = math.inf
    least_minutes: float = 0.0  # minimum time between two if they are due by epochs

    @classmethod
    def parse(cls, text: str) -> "Every":
        """Parses the value of a flag. Raises ValueError."""
        if text == "auto":
            return cls(epochs=1, least_minutes=1)
        number = _number(text.removesuffix("m"))
        if not number > 0:
            raise ValueError(f"'{text}' is neither auto, a number of epochs, such as 0.5, nor of minutes, such as 10m")
        return cls(minutes=number) if text.endswith("m") else cls(epochs=number)

    def is_due(self, since: int, now: int, train_samples: int) -> bool:
        """Whether a multiple of `epochs` lies between two positions in the stream of samples."""
        length = self.epochs * train_samples
        return now // length > since // length

    def has_passed(self, seconds: float) -> bool:
        return seconds >= 60 * self.minutes


def sizes(text: str) -> Piecewise:
    return _within(Piecewise.parse(text, int), 1, 2**31 - 1)


def span(text: str) -> Piecewise | None:
    """Parses a batch-norm span, or auto into None. Raises ValueError."""
    return None if text == "auto" else sizes(text)


def image_sizes(text: str) -> Piecewise:
    return _within(Piecewise.parse(text, int), 1, 4096)


def rates(text: str) -> Piecewise:
    return _within(Piecewise.parse(text), 0, 1e30)


def _within(schedule, low, high):
    if not all(low <= number <= high for number in schedule.values):
        raise ValueError(f"not between {low} and {high}")
    return schedule


def loss_scale(text: str) -> float | None:
    """Parses a fixed loss scale, or dynamic into None. Raises ValueError."""
    if text == "dynamic":
        return None
    if not 1 <= _number(text) <= 2**24:
        raise ValueError(f"'{text}' is neither dynamic nor between 1 and {2**24}")
    return float(text)


def class_weights(text: str) -> float:
    """Parses the power of the class weights, from 0 (none) to 1 (balanced). Raises ValueError."""
    power = _number({"none": "0", "balanced": "1"}.get(text, text))
    if not 0 <= power <= 1:
        raise ValueError(f"'{text}' is neither none, balanced nor a power from 0 to 1")
    return power


def fraction(text: str) -> float:
    """Parses an accuracy above 0, as a fraction of 1. Raises ValueError."""
    value = _number(text)
    if 1 < value <= 100:
        raise ValueError(f"{text} is not a fraction of 1; did you mean {value / 100:g}?")
    if not 0 < value <= 1:
        raise ValueError(f"{text} is not a fraction from 0 to 1, such as 0.759")
    return value


def _number(text: str) -> float:
    """Returns the number in a text, or NaN, which is in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def range_of_steps(text: str) -> tuple[int, int]:
    first, separator, end = text.partition(":")
    if not (separator and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ValueError(f"'{text}' is not a range of steps such as 100:110")
    return int(first), int(end)


def ascending(texts: list[str]) -> tuple[float, ...]:
    boundaries = tuple(map(float, texts))
    if list(boundaries) != sorted(set(boundaries)):
        raise ValueError("the epochs must be in ascending order")
    return boundaries


def names_in_modules(texts: list[str]) -> tuple[str, ...]:
    for text in texts:
        if not own.SPELLING.fullmatch(text):
            raise ValueError(f"'{text}' is not MODULE:NAME, such as my_observers:Printer{own.respelled(text)}")
    return tuple(texts)


def number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def same(one, other) -> bool:
    """Whether two values of a flag, texts or lists of texts, mean the same: 1e-4 and 0.0001 do, 2 and 0:2 do."""
    return _meaning(one) == _meaning(other)


def _meaning(value):
    """Returns the pairs of a number or schedule, the items of a list, or the text itself."""
    text = ",".join(value) if isinstance(value, list) else str(value)
    try:
        return Piecewise.parse(text).pairs
    except ValueError:
        items = text.split(",")
        return [_meaning(item) for item in items] if len(items) > 1 else text
