"""The plan combines a recipe (what to train) and a launch (on how many workers). Plain Python, no TensorFlow."""
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from common.errors import UsageError, UserError, plural
from data import order
from optim import OPTIMIZERS, schedules
from optim.schedules import Piecewise
from plan.allreduce import RING, AllreducePlan, plan_allreduce
from plan.settings import Launch, Recipe, Settings

LARGEST_MICRO_BATCH = 64  # samples, unless --micro_batch_size or --batch_norm_span ask for more


@dataclass(frozen=True)
class Phase:
    """A part of the training with a fixed global batch size, batch-norm span and image size."""

    start_epoch: float
    end_epoch: float  # exclusive
    global_batch_size: int  # workers x micro_batch_size x accumulation_steps; less if elastic workers share unevenly
    micro_batch_size: int
    accumulation_steps: int
    steps: int
    # Number of samples over which batch norm computes its statistics: a part of a micro-batch, all of it, or the
    # micro-batches of several workers.
    batch_norm_span: int
    image_size: int | None = None  # None: the model's own
    workers: int = 1

    @property
    def neighbours(self) -> int:
        """Number of workers that share batch norm's statistics."""
        return max(1, self.batch_norm_span // self.micro_batch_size)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a global batch."""
        return self.global_batch_size // self.micro_batch_size

    def micro_batches_of(self, rank: int, workers: int) -> range:
        """Returns the micro-batches of a global batch that a worker processes, by number."""
        return order.micro_batches(self.global_batch_size, self.micro_batch_size, rank, workers, self.neighbours)


@dataclass(frozen=True)
class Interval:
    """The steps from one evaluation, or the start of a phase, to the next evaluation or the end of the phase."""

    phase: Phase
    start: int  # position of the first sample in the endless stream of training samples
    steps: int
    first_step: int  # index in the whole training, from 0
    epoch: float | None  # epochs completed at the end if an evaluation follows, None otherwise
    evaluations: int  # number from the start of the training to the end of this interval

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation follows."""
        return self.epoch is not None

    @property
    def end(self) -> int:
        """Index of the step after the last one."""
        return self.first_step + self.steps

    def position(self, step: int) -> int:
        """The position in the stream of a step's first sample."""
        return self.start + (step - self.first_step) * self.phase.global_batch_size


@dataclass(frozen=True)
class Plan:
    """The phases of a training and its schedules on a number of workers. `as_json` is the content of plan.json."""

    workers: int
    train_samples: int  # size of the training set
    epochs: float
    learning_rate: schedules.LearningRate
    momentum_schedule: str
    momentum: float
    phases: tuple[Phase, ...]
    allreduce: AllreducePlan = RING
    evaluate_every: int = 1  # epochs
    reads_by_file: bool = False  # whether the workers divide each epoch among themselves, as --order=file needs
    momentum_correction: bool = False  # see step_momentum
    model: str = ""  # its name
    shares_orthogonalization: bool = False  # whether each worker orthogonalizes a part of Muon's kernels

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def samples(self) -> int:
        """Number of samples that all steps process."""
        return sum(phase.steps * phase.global_batch_size for phase in self.phases)

    def position(self, step: int) -> int:
        """The position in the stream of a step's first sample; at the end, the position after the last sample."""
        first, phase = self._phase_of(step)
        return stream_position(phase.start_epoch, self.train_samples) + (step - first) * phase.global_batch_size

    def _phase_of(self, step: int) -> tuple[int, Phase]:
        """Returns the phase of a step, and the phase's first step: (first step, phase)."""
        firsts = itertools.accumulate((phase.steps for phase in self.phases[:-1]), initial=0)
        return [pair for pair in zip(firsts, self.phases, strict=True) if pair[0] <= step][-1]

    def phase_at(self, epoch: float) -> Phase:
        return [phase for phase in self.phases if phase.start_epoch <= max(0, epoch)][-1]

    def momentum_of(self, phase: Phase) -> float:
        return schedules.momentum_at(self.momentum_schedule, self.momentum, phase.global_batch_size)

    def rates(self, epoch: float) -> dict:
        """Learning rate, momentum and global batch size at an epoch; at the end, those of the last phase."""
        phase = self.phase_at(epoch)
        return {"learning_rate": self.learning_rate(epoch), "momentum": self.momentum_of(phase),
                "global_batch_size": phase.global_batch_size}

    def epoch_of(self, step: int) -> float:
        """Returns the epoch at which a step's rates are taken: that of its first sample, but not before its phase.

        A phase whose start lies between two samples begins with the sample before.
        """
        _, phase = self._phase_of(step)
        return max(self.position(step) / self.train_samples, phase.start_epoch)

    def step_momentum(self, step: int) -> float:
        """Returns the momentum of a step.

        With momentum correction (arXiv:1706.02677, section 3.1), it is multiplied by the learning rate / that of the
        step before, unless that is 0, because the buffer contains the rates of earlier steps. The paper claims that
        otherwise, where the rate rises fast, earlier gradients count too little, which makes training unstable.
        """
        _, phase = self._phase_of(step)
        rate, before = (self.learning_rate(self.epoch_of(number)) for number in (step, max(0, step - 1)))
        return self.momentum_of(phase) * (rate / before if self.momentum_correction and before else 1.0)

    def as_json(self) -> dict:
        return {
            "workers": self.workers, "model": self.model, "train_samples": self.train_samples, "epochs": self.epochs,
            "steps": self.steps, "peak_learning_rate": self.learning_rate.peak,
            "exchange": self.allreduce.as_json(), "shares_orthogonalization": self.shares_orthogonalization,
            "phases": [vars(phase) for phase in self.phases],
            "learning_rate_breakpoints": self.learning_rate.breakpoints,
            "schedule": [{"epoch": epoch, **self.rates(epoch)} for epoch in range(math.ceil(self.epochs))],
        }

    def intervals(self) -> Iterator[Interval]:
        """Yields the intervals of the training, which end at each evaluation and at each new phase.

        An evaluation follows the first step that reaches position e * train_samples of the stream, for each e that is a
        multiple of evaluate_every, and the last step. A step that reaches several such positions is followed by one
        evaluation. Each phase starts at its epoch's first sample, even if the phase before left samples unread. With
        `reads_by_file`, intervals also end with each epoch.
        """
        step, cut, evaluated, evaluations = 0, 0, 0, 0
        every = 1 if self.reads_by_file else self.evaluate_every
        for phase in self.phases:
            batch, position = phase.global_batch_size, stream_position(phase.start_epoch, self.train_samples)
            left = phase.steps
            while left:
                to_cut = -(-((cut + every) * self.train_samples - position) // batch)
                steps = min(left, max(1, to_cut))
                end = position + steps * batch
                left -= steps
                last = not left and phase is self.phases[-1]
                reached = min(end // self.train_samples, math.floor(self.epochs))
                cut = max(cut, reached - reached % every)
                reached -= reached % self.evaluate_every
                epoch = self.epochs if last else reached if reached > evaluated else None
                evaluations += epoch is not None
                yield Interval(phase, start=position, steps=steps, first_step=step, epoch=epoch,
                               evaluations=evaluations)
                position, step, evaluated = end, step + steps, max(evaluated, reached)


def stream_position(epoch: float, train_samples: int) -> int:
    """Returns the position of an epoch's first sample in the stream of epoch 0's permutation, epoch 1's, and so on."""
    return math.floor(_exact(epoch) * train_samples)


def plan_for(settings: Settings, workers: int, workers_per_node: int, train_samples: int,
             allreduce: AllreducePlan | None = None, has_equal_processors: bool = True) -> Plan:
    """Returns the plan of a command line. Raises UserError. allreduce: of these workers, if it has been planned."""
    launch = settings.launch
    allreduce = allreduce or allreduce_for(launch, workers, workers_per_node)
    plan = make_plan(settings.recipe, launch.micro_batch_size, workers, train_samples, allreduce, launch.elastic,
                     launch.workers_schedule)
    plan = replace(plan, shares_orthogonalization=shares_orthogonalization(
        settings, workers, workers_per_node, has_equal_processors))
    if (launch.elastic or launch.xla == "true") and any(phase.neighbours > 1 for phase in plan.phases):
        without = "elastic" if launch.elastic else "xla"
        raise UserError(f"--batch_norm_span: its groups would span several workers, which --{without} does not "
                        "support; start fewer workers or choose a smaller span")
    if settings.run.log_noise_scale and any(phase.micro_batches == 1 for phase in plan.phases):
        raise UserError("--log_noise_scale: a batch of a single micro-batch has no noise to compare; give a smaller "
                        "--micro_batch_size")
    return plan


def shares_orthogonalization(settings: Settings, workers: int, workers_per_node: int,
                             has_equal_processors: bool) -> bool:
    """Whether each worker orthogonalizes a part of Muon's kernels, which are then exchanged as gradients are.

    For ResNet-50, that is 102 MB more. Within a node, these take less time than they save. Workers with different
    processors have to share, because each would otherwise compute all kernels with other last bits.
    """
    launch = settings.launch
    can_share = OPTIMIZERS[settings.recipe.optimizer].shares_matrices
    if not can_share or workers == 1 or launch.share_orthogonalization == "false":
        return False
    if launch.share_orthogonalization == "true" and launch.xla == "true":
        raise UsageError("--share_orthogonalization: not with --xla=true, which cannot contain an exchange")
    return launch.share_orthogonalization == "true" or (
        launch.xla != "true" and (workers <= workers_per_node or not has_equal_processors))


def allreduce_for(launch: Launch, workers: int, workers_per_node: int, nccl: bool | None = None) -> AllreducePlan:
    """Returns the all-reduce of a launch. nccl: whether Horovod uses NCCL, None if that is not known yet."""
    return plan_allreduce(launch.allreduce, launch.torus_grid, workers, workers_per_node, launch.elastic, nccl)


def make_plan(recipe: Recipe, micro_batch_size: int | None, workers: int, train_samples: int,
              allreduce: AllreducePlan = RING, uneven: bool = False,
              workers_schedule: Piecewise | None = None) -> Plan:
    """Returns the plan of a recipe on a number of workers. Raises UserError if the recipe cannot be carried out.

    If a batch size is not divisible, the error names the nearest sizes that are. uneven: whether workers may instead
    process different numbers of micro-batches, at least one each, as elastic training does. workers_schedule: number of
    workers from each epoch on.
    """
    batches, epochs = recipe.batch_size, tidy(recipe.epochs)
    changing = [schedule for schedule in (batches, recipe.batch_norm_span, recipe.image_size) if schedule]
    starts = sorted({start for schedule in changing for start in schedule.boundaries})
    if workers_schedule and not {*workers_schedule.boundaries} <= {*starts}:
        raise UsageError(f"--workers_schedule={workers_schedule}: the number of workers can change where a phase of "
                         f"the recipe starts: {', '.join(f'{start:g}' for start in starts)}")
    phases = tuple(_phase(recipe, tidy(start), tidy(end), micro_batch_size,
                          workers_schedule(start) if workers_schedule else workers, train_samples, uneven)
                   for start, end in zip(starts, [*starts[1:], epochs], strict=True))
    rate = schedules.scaled(recipe.learning_rate, recipe.lr_scaling, recipe.base_batch_size, batches.values[0])
    learning_rate = schedules.LearningRate(
        rate, epochs, recipe.lr_schedule, recipe.poly_power, boundaries=recipe.lr_boundaries, warmup=recipe.warmup,
        warmup_epochs=recipe.warmup_epochs, warmup_learning_rate=recipe.warmup_learning_rate,
        decay_from=recipe.decay_from, end=recipe.end_learning_rate)
    first, full = recipe.warmup_learning_rate, rate(recipe.warmup_epochs)
    if recipe.warmup == "gradual" and recipe.warmup_epochs and first > full:
        raise UserError(f"--warmup=gradual would lower the learning rate from {first:g} to {full:g}; choose a lower "
                        "--warmup_learning_rate")
    plan = Plan(
        workers=workers, train_samples=train_samples, epochs=epochs, learning_rate=learning_rate,
        momentum_schedule=recipe.momentum_schedule, momentum=recipe.momentum, phases=phases, allreduce=allreduce,
        evaluate_every=recipe.evaluate_every, reads_by_file=recipe.order == "file",
        momentum_correction=recipe.momentum_correction and "nesterov" in OPTIMIZERS[recipe.optimizer].options,
        model=recipe.model)
    try:
        for phase in phases:
            plan.momentum_of(phase)
    except ValueError as error:
        raise UserError(str(error)) from None
    return plan


def _phase(recipe, start, end, micro_batch, workers, train_samples, uneven):
    batch, span, image_size = (values and values(start) for values in (
        recipe.batch_size, recipe.batch_norm_span, recipe.image_size))
    in_pairs = bool(recipe.mixup or recipe.cutmix)
    if in_pairs and (micro_batch or 0) % 2:
        raise UserError(f"--micro_batch_size: {micro_batch} is odd; --mixup and --cutmix need an even size, because "
                        "they combine the images in pairs")
    micros = _micro_batch_sizes(batch, micro_batch, workers, in_pairs, uneven, span or 1)
    micro = max(size for size in micros if size <= LARGEST_MICRO_BATCH or micro_batch)
    if span:
        micro = _micro_batch_for_span(span, micros, workers)
    steps = max(1, math.floor((_exact(end) - _exact(start)) * train_samples / batch))
    return Phase(start_epoch=start, end_epoch=end, global_batch_size=batch, micro_batch_size=micro,
                 accumulation_steps=-(-batch // (workers * micro)), steps=steps, batch_norm_span=span or micro,
                 image_size=image_size, workers=workers)


def _micro_batch_sizes(batch, given, workers, in_pairs, uneven, span) -> list[int]:
    """Returns the possible sizes of a micro-batch. Raises UserError if there is none.

    With `uneven`, workers may have different numbers of micro-batches if none of the sizes that divide their parts is a
    multiple of the batch-norm span: workers with different numbers cannot share batch norm's statistics.
    """
    sizes = [given] if given else [size for size in divisors(batch) if not in_pairs or size % 2 == 0]
    fitting = [size for size in sizes if batch % (workers * size) == 0]
    if uneven and not any(size % span == 0 for size in fitting):
        dividing = [size for size in sizes if batch % size == 0 and batch >= workers * size]
        fitting = [size for size in dividing if size % span == 0] or dividing
    if fitting:
        return fitting
    unit = workers * (given or 1 + in_pairs)
    below, above = batch // unit * unit, (batch // unit + 1) * unit
    nearest = " and ".join(str(size) for size in (below, above) if size)
    by = plural(workers, "worker") + (
        f" x --micro_batch_size={given}" if given else " x 2, for --mixup and --cutmix" * in_pairs)
    raise UserError(f"--batch_size: {batch} is not divisible by {by}; the nearest sizes that are: {nearest}")


def _micro_batch_for_span(span, micros, workers) -> int:
    """Returns the micro-batch size for a batch-norm span. micros: the sizes that divide a worker's part of the batch.

    It is the largest multiple of the span up to 64, or the span itself. If none of the sizes is a multiple, it is the
    largest that divides the span, so that the fewest workers share statistics. Raises UserError, with the nearest
    possible spans.
    """
    largest = max(span, LARGEST_MICRO_BATCH)
    multiples = [size for size in micros if size % span == 0 and (size <= largest or len(micros) == 1)]
    shared = [size for size in micros if span % size == 0 and workers % (span // size) == 0]
    if multiples or shared:
        return max(multiples or shared)
    spans = {part for size in micros for part in divisors(size)} | {
        size * group for size in micros for group in divisors(workers)}
    nearest = [max((size for size in spans if size < span), default=None),
               min((size for size in spans if size > span), default=None)]
    raise UserError(f"--batch_norm_span: {span} samples cannot be composed of micro-batches of "
                    f"{' or '.join(map(str, micros[-3:]))} on {plural(workers, 'worker')}; the nearest "
                    f"possible spans: {' and '.join(str(size) for size in nearest if size)}")


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _exact(number):
    """Returns the decimal as written, not the nearest binary fraction, for which floor(0.29 * 100) would be 28."""
    return Fraction(str(number))


def tidy(number):
    return int(number) if number == int(number) else number
