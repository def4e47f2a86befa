"""The plan: where a recipe (what to train) and a launch (on how many workers) meet. Plain Python, no TensorFlow."""
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from optim import schedules
from optim.route import RING, Route
from training.errors import UserError

DEFAULT_LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one global batch size = workers x micro-batch x accumulation steps."""

    start_epoch: float
    end_epoch: float  # exclusive
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    steps: int


@dataclass(frozen=True)
class Interval:
    """The steps from one evaluation, or from a phase's start, to the next evaluation or the phase's end."""

    phase: Phase
    start: int  # position of the first sample in the endless stream of training samples
    steps: int
    first_step: int  # of the whole training, from 0
    epoch: int | None  # whole epochs completed at the end, where an evaluation follows; None where none does

    @property
    def end(self) -> int:
        """The step after its last."""
        return self.first_step + self.steps

    def position(self, step: int) -> int:
        """The place in the stream of a step's first sample."""
        return self.start + (step - self.first_step) * self.phase.global_batch_size


@dataclass(frozen=True)
class Plan:
    """What will be trained, in which phases, at which rates; `as_json` is plan.json."""

    workers: int
    train_samples: int
    epochs: float
    learning_rate: schedules.LearningRate
    momentum_schedule: str
    momentum: float
    phases: tuple[Phase, ...]
    route: Route = RING

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def samples(self) -> int:
        return sum(phase.steps * phase.global_batch_size for phase in self.phases)

    def position(self, step: int) -> int:
        """The place in the stream of a step's first sample; at the end, the place after the last."""
        return [interval for interval in self.intervals() if interval.first_step <= step][-1].position(step)

    def phase_at(self, epoch: float) -> Phase:
        return [phase for phase in self.phases if phase.start_epoch <= max(0, epoch)][-1]

    def momentum_of(self, phase: Phase) -> float:
        return schedules.momentum_at(self.momentum_schedule, self.momentum, phase.global_batch_size)

    def rates(self, epoch: float) -> dict:
        """Learning rate, momentum and global batch size at an epoch; at the end, those of the last phase."""
        phase = self.phase_at(epoch)
        return {"learning_rate": self.learning_rate(epoch), "momentum": self.momentum_of(phase),
                "global_batch_size": phase.global_batch_size}

    def as_json(self) -> dict:
        return {
            "workers": self.workers, "train_samples": self.train_samples, "epochs": self.epochs, "steps": self.steps,
            "peak_learning_rate": self.learning_rate.peak, "exchange": self.route.as_json(),
            "phases": [dataclasses.asdict(phase) for phase in self.phases],
            "schedule": [{"epoch": epoch, **self.rates(epoch)} for epoch in range(math.ceil(self.epochs))],
        }

    def intervals(self) -> Iterator[Interval]:
        """The training, cut where an evaluation or a new phase comes.

        An evaluation comes after the first step that has processed e * train_samples samples, for each whole e, and
        at the end. Each phase starts at its epoch's first sample, whatever the one before has left unread.
        """
        step, evaluated = 0, 0
        for phase in self.phases:
            batch, position = phase.global_batch_size, stream_position(phase.start_epoch, self.train_samples)
            left = phase.steps
            while left:
                to_epoch_end = -(-((evaluated + 1) * self.train_samples - position) // batch)
                steps = min(left, max(1, to_epoch_end))
                end = position + steps * batch
                left -= steps
                last = not left and phase is self.phases[-1]
                reached = min(end // self.train_samples, math.floor(self.epochs))
                epoch = math.floor(self.epochs) if last else reached if reached > evaluated else None
                yield Interval(phase, position, steps, step, epoch)
                position, step, evaluated = end, step + steps, max(evaluated, reached)


@dataclass(frozen=True)
class Every:
    """How often something is done: `1` or `0.5`, in epochs; `10m`, in minutes."""

    epochs: float = math.inf
    minutes: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "Every":
        """Raises ValueError."""
        every = cls(minutes=float(text[:-1])) if text.endswith("m") else cls(epochs=float(text))
        if not (every.epochs > 0 and every.minutes > 0):
            raise ValueError(f"'{text}' is neither a number of epochs nor one of minutes, such as 10m")
        return every

    def is_due(self, since: int, now: int, train_samples: int) -> bool:
        """Whether a multiple of the epochs lies between two places in the stream."""
        length = self.epochs * train_samples
        return now // length > since // length

    def has_passed(self, seconds: float) -> bool:
        return seconds >= 60 * self.minutes


def stream_position(epoch: float, train_samples: int) -> int:
    """The place of an epoch's first sample in the stream: epoch 0's permutation, then epoch 1's, and so on."""
    return math.floor(_exact(epoch) * train_samples)


def make_plan(config, workers: int, train_samples: int, route: Route = RING) -> Plan:
    """Raises UserError where a batch does not divide, naming the nearest that do.

    config: has the recipe's flags as attributes, batch_size and learning_rate as their text.
    """
    batches = schedules.Piecewise.parse(config.batch_size, int)
    epochs = int(config.epochs) if config.epochs == int(config.epochs) else config.epochs
    ends = [*batches.boundaries[1:], epochs]
    if any(start >= epochs for start in batches.boundaries):
        raise UserError(f"--batch_size={config.batch_size} has a phase that starts at or after --epochs={epochs}")
    phases = tuple(
        _phase(_tidy(start), _tidy(end), batch, config.micro_batch_size, workers, train_samples)
        for start, end, batch in zip(batches.boundaries, ends, batches.values, strict=True))
    rate = schedules.scaled(schedules.Piecewise.parse(config.learning_rate), config.lr_scaling,
                            config.base_batch_size, batches.values[0])
    learning_rate = schedules.LearningRate(
        rate, epochs, config.lr_schedule, config.poly_power, tuple(map(float, config.lr_boundaries)), config.warmup,
        config.warmup_epochs, config.warmup_learning_rate, config.decay_from)
    plan = Plan(workers, train_samples, epochs, learning_rate, config.momentum_schedule, config.momentum, phases,
                route)
    try:
        plan.as_json()
    except ValueError as error:
        raise UserError(str(error)) from None
    return plan


def _phase(start, end, batch, micro_batch, workers, train_samples):
    unit = workers * (micro_batch or 1)
    if batch % unit:
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        nearest = " and ".join(str(size) for size in (below, above) if size)
        by = f"{workers} worker{'s' * (workers > 1)}" + (f" x --micro_batch_size={micro_batch}" if micro_batch else "")
        raise UserError(f"--batch_size: {batch} does not divide by {by}; the nearest sizes that do: {nearest}")
    per_worker = batch // workers
    micro = micro_batch or max(size for size in range(1, min(per_worker, DEFAULT_LARGEST_MICRO_BATCH) + 1)
                               if per_worker % size == 0)
    steps = max(1, math.floor((_exact(end) - _exact(start)) * train_samples / batch))
    return Phase(start, end, batch, micro, per_worker // micro, steps)


def _exact(number):
    """The decimal that was written, not the nearest binary fraction: floor(0.3 * 10) has to be 3 in every phase."""
    return Fraction(str(number))


def _tidy(number):
    return int(number) if number == int(number) else number
