"""Learning rate, momentum and batch size as functions of the epoch, in plain Python.

The epoch is a float: samples processed divided by the size of the training set (arXiv:1811.05233, section 3.2).
A schedule is therefore the same on any number of workers, with gradient accumulation and after a resume.
"""
import bisect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Piecewise:
    """A piecewise constant value: `0:29,30:50` is 29 up to epoch 30, then 50. `29` is 29 throughout."""

    pairs: tuple[tuple[float, float], ...]

    @classmethod
    def parse(cls, text, number: Callable = float) -> "Piecewise":
        """Parses one number, or `epoch:number` pairs with epochs that rise from 0. Raises ValueError."""
        items = [item.split(":") for item in str(text).split(",")]
        try:
            if items == [[str(text)]]:
                return cls(((0.0, number(text)),))
            pairs = tuple((float(epoch), number(value)) for epoch, value in items)
        except ValueError:
            raise ValueError(f"'{text}' is neither a number nor epoch:value pairs such as 0:29,30:50") from None
        epochs = [epoch for epoch, _ in pairs]
        if not all(map(math.isfinite, (*epochs, *(value for _, value in pairs)))):
            raise ValueError(f"the numbers in '{text}' must be finite")
        if epochs[0] != 0 or any(b <= a for a, b in itertools.pairwise(epochs)):
            raise ValueError(f"the epochs in '{text}' must start at 0 and increase")
        return cls(pairs)

    def __call__(self, epoch: float):
        return self.pairs[max(0, bisect.bisect_right([e for e, _ in self.pairs], epoch) - 1)][1]

    def __str__(self):
        if len(self.pairs) == 1:
            return f"{self.values[0]:.12g}"
        return ",".join(f"{epoch:g}:{value}" for epoch, value in self.pairs)

    @property
    def boundaries(self) -> list[float]:
        return [epoch for epoch, _ in self.pairs]

    @property
    def values(self) -> list:
        return [value for _, value in self.pairs]


# Fraction of the base rate that is left at an epoch. t: elapsed fraction of the decay.
DECAYS = {
    "poly": lambda schedule, t, epoch: (1 - t) ** schedule.power,
    "cosine": lambda schedule, t, epoch: (1 + math.cos(math.pi * t)) / 2,
    "multistep": lambda schedule, t, epoch: 0.1 ** sum(epoch >= boundary for boundary in schedule.boundaries),
    "constant": lambda schedule, t, epoch: 1.0,
}
WARMUPS = ("none", "gradual", "constant")
DECAY_CLOCKS = ("start", "warmup_end")
ENDING = ("poly", "cosine")  # decays that end at a rate
SCALINGS = {
    "none": lambda factor: 1.0,
    "linear": lambda factor: factor,
    "sqrt": math.sqrt,
}
MOMENTUM_SCHEDULES = ("constant", "noise_scale")


@dataclass(frozen=True)
class LearningRate:
    """The learning rate at an epoch: a warm-up, then a decay of the base rate.

    base: the rate before decay, after scaling (gamma in arXiv:1708.03888).
    epochs: number of epochs of the training, at whose end the decay ends.
    decay: poly (arXiv:1708.03888, table 1), multistep (a tenth at each boundary, section 3.1), cosine, constant.
    power: exponent of poly. boundaries: epochs of multistep.
    warmup: gradual rises linearly from `warmup_learning_rate` to the base rate; constant stays at
        `warmup_learning_rate`. Both last `warmup_epochs` (arXiv:1708.03888, section 2.3).
    decay_from: start of the decay. start: epoch 0 (arXiv:1811.05233, configuration B: the rate jumps at the end of the
        warm-up). warmup_end: the end of the warm-up (configuration A: no jump).
    end: the rate at which poly and cosine end, as in MLPerf's reference.
    """

    base: Piecewise
    epochs: float
    decay: str = "poly"
    power: float = 2.0
    boundaries: tuple[float, ...] = ()
    warmup: str = "none"
    warmup_epochs: float = 0.0
    warmup_learning_rate: float = 0.0
    decay_from: str = "start"
    end: float = 0.0

    def __call__(self, epoch: float) -> float:
        if self.warmup != "none" and epoch < self.warmup_epochs:
            return self._warm(epoch)
        return self._decayed(epoch)

    def _warm(self, epoch):
        if self.warmup == "constant":
            return self.warmup_learning_rate
        start = self.warmup_learning_rate
        return start + (self.base(epoch) - start) * epoch / self.warmup_epochs

    def _decayed(self, epoch):
        origin = self.warmup_epochs if self.decay_from == "warmup_end" and self.warmup != "none" else 0.0
        length = self.epochs - origin
        t = min(1.0, max(0.0, (epoch - origin) / length)) if length > 0 else 0.0
        end = self.end if self.decay in ENDING else 0.0
        return end + (self.base(epoch) - end) * DECAYS[self.decay](self, t, epoch)

    @property
    def breakpoints(self) -> list[tuple[float, float]]:
        """(epoch, rate) on both sides of each epoch at which the rate may jump or turn. It is monotonic in between."""
        breaks = sorted({0.0, self.warmup_epochs, *self.base.boundaries, *self.boundaries, self.epochs})
        return [(side, self(side)) for epoch in breaks if epoch <= self.epochs
                for side in (math.nextafter(epoch, 0), epoch)]

    @property
    def peak(self) -> float:
        """The supremum of the rate. At a downward jump, the limit from the left counts."""
        return float(f"{max(rate for _, rate in self.breakpoints):.12g}")


def scaled(rate: Piecewise, rule: str, base_batch_size: float, batch_size: float) -> Piecewise:
    """Scales a base rate from `base_batch_size` to `batch_size` (arXiv:1708.03888, section 2.3)."""
    factor = SCALINGS[rule](batch_size / base_batch_size)
    return Piecewise(tuple((epoch, value * factor) for epoch, value in rate.pairs))


def momentum_at(kind: str, momentum: float, batch_size: int) -> float:
    """Returns the momentum (mu) for a global batch size. kind: one of MOMENTUM_SCHEDULES.

    `noise_scale` is configuration B of arXiv:1811.05233: NoiseScale = rate * 32 * 1024 / (1 - 0.9) and
    Momentum = 1 - rate * B / NoiseScale. The rate cancels, and `momentum` takes the place of 0.9:
    1 - (1 - momentum) * B / 32768. Raises ValueError unless the result is positive.
    """
    if kind == "constant":
        return momentum
    value = 1 - (1 - momentum) * batch_size / 32768
    if value <= 0:
        raise ValueError(f"--momentum_schedule=noise_scale gives no positive momentum at batch size {batch_size}; "
                         "reduce --batch_size")
    return value
