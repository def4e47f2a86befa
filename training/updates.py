"""The edge of the compiled step: what an update is given, when its results are known, and how long it took."""
import contextlib
import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from common.activity import OBSERVERS, activity
from common.startup import startup
from plan.plan import Interval
from training.bad_input import bad_input_is_user_error
from training.breakdown import TIMED_ONE_IN, StepTimes, on_host
from training.build import Job
from training.divergence import Diverged
from training.marks import marks
from training.observer import Observer, Update
from training.profiling import profiled
from training.reading import TrainingInput
from training.recovery import Recovery
from training.slow import SlowWorkers
from training.step import NO_SIGNALS, StepResult


@dataclass(frozen=True)
class Step:
    """An update of the weights.

    number: index in the whole training, from 0. position: that of its first sample in the stream. timed: whether it
    measures its waiting times. is_last: whether it is the last of its interval.
    """

    number: int
    position: int
    epoch: float
    learning_rate: float
    momentum: float
    batch_size: int
    micro_batch_size: int
    timed: bool
    is_last: bool

    @property
    def arguments(self) -> tuple[tf.Tensor, ...]:
        """The arguments of a compiled step, except its data and its signals."""
        return (on_host(self.learning_rate, tf.float32), on_host(self.momentum, tf.float32), on_host(self.timed),
                on_host(self.position, tf.int64))


class Updates:
    """Context manager for the updates of a training.

    The host is one step ahead of the device. Only a timed step runs alone, and the results of the first step of all and
    of the last step of an interval are known before anything else happens.

    A thread copies each result to the host. The copy is requested right after the launch of its step: TensorFlow's copy
    waits for all operations that were queued on a GPU before, so a later request would wait for the next step, too.
    """

    def __init__(self, job: Job, recovery: Recovery, observers: Sequence[Observer] = ()):
        self.job = job
        self.recovery = recovery
        self.observers = observers
        self.times = StepTimes()
        self.slow = SlowWorkers()
        self._input = TrainingInput(job)
        self._pending = deque()  # steps that were launched but have no results yet, oldest first
        self._reader = ThreadPoolExecutor(1, "results")
        self._shapes = StepResult.shapes(len(job.state.model.trainable_variables), job.state.noise is not None)

    def __enter__(self):
        self._input.__enter__()
        return self

    def __exit__(self, *error):
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._input.__exit__(*error)

    def of(self, interval: Interval) -> Iterator[Step]:
        """Yields the steps that are left of an interval, each when it may be launched.

        Raises Stopped if its phase needs other workers.
        """
        job, progress = self.job, self.job.state.progress
        if progress.step >= interval.end:
            return
        if interval.phase.workers != job.world.size:
            self.recovery.hand_over(interval.phase.workers)
        self._interval = interval
        self._first = progress.step
        self._train_step = job.train_step(interval.phase)
        self._batches = self._input.read_on(interval)
        self._inside = functools.partial(marks().in_update, interval.phase.neighbours > 1)
        with activity.during("training", self._inside):
            while progress.step < interval.end:
                self._began = time.perf_counter()
                step = next_step(job, interval, self._first)
                activity.step = step.number
                self._signals = self.settle(leaving=0 if step.timed else 1)
                yield step

    @contextlib.contextmanager
    def launching(self, step: Step) -> Iterator[tuple]:
        """Context manager for the launch of a step. Yields (the compiled step, its arguments).

        Raises UserError for data that cannot be read.
        """
        world, phase = self.job.world, self._interval.phase
        self._launched = time.perf_counter()
        read = self._input.samples_before(step.number, self._interval)
        with bad_input_is_user_error(f"training stopped at epoch {step.epoch:.3f}", self._batches, read), \
                profiled(self.observers, step.number):
            self._admitted = self._batches.admit(len(phase.micro_batches_of(world.rank, world.size)))
            records = on_host(step.is_last or not step.number)  # which are the updates whose statistics are read
            arguments = self._batches.iterator, *step.arguments, self.recovery.signals(), records
            if startup.is_open:
                with startup.stage("tracing a step"):
                    self._train_step.get_concrete_function(*arguments)
            with startup.stage("the first step", self._inside) if startup.is_open else contextlib.nullcontext():
                yield self._train_step, arguments

    def add(self, step: Step, packed: tf.Tensor) -> None:
        """Counts a step that was launched. Waits for what has to be known now, and saves or stops if that is due.

        packed: the step's result. Raises Diverged for the first step that diverged, and Stopped, on all workers.
        """
        progress = self.job.state.progress
        progress.step += 1
        progress.samples += step.batch_size
        self._pending.append((step, self._launched, self._admitted.seconds, self._reader.submit(packed.numpy)))
        signals = self._signals + self.settle(leaving=0 if step.timed or step.is_last or not step.number else 1)
        seconds = time.perf_counter() - self._began
        progress.trained_seconds += seconds
        self.times.add(step.batch_size, seconds, self._admitted)
        if self.recovery.is_due_after(signals):
            signals += self.settle()
            self.recovery.after_step(signals, before_evaluation=step.is_last and self._interval.evaluates)

    def settle(self, leaving: int = 0) -> np.ndarray:
        """Waits for the results of all steps except the last `leaving`, and notifies the observers.

        Returns the sum of the steps' signals. Raises Diverged for the first step that diverged, on all workers at once.
        """
        job, noise = self.job, self.job.state.noise
        signals = np.array(NO_SIGNALS)
        while len(self._pending) > leaving:
            step, launched, storage, packed = self._pending.popleft()
            result = StepResult.unpacked(packed.result(), self._shapes)
            seconds = time.perf_counter() - launched
            waits = self.times.add_timed(seconds, result.waited + np.array([storage, 0])) if step.timed else {}
            if noise:
                noise.add(step.batch_size, step.micro_batch_size, result.norms, result.squares)
            if problem := job.divergence(result.loss, result.norms):
                raise Diverged(problem, step.number, step.epoch, step.learning_rate)
            update = Update(step.number, step.epoch, step.batch_size, step.learning_rate, step.momentum,
                            result.loss, result.top1, waits, {} if step.number else job.layers())
            with activity.during(OBSERVERS):
                for observer in self.observers:
                    observer.step(update)
            signals += result.signals
        return signals


def next_step(job: Job, interval: Interval, first: int) -> Step:
    """Returns the step after the last one launched. first: the step at which reading of the interval starts.

    The second step is timed, and every TIMED_ONE_IN-th after it. The first may have to wait until all workers begin.
    """
    plan, phase = job.plan, interval.phase
    number = job.state.progress.step
    epoch = plan.epoch_of(number)
    is_timed = (number - first) % TIMED_ONE_IN == min(1, interval.end - first - 1)
    return Step(number, plan.position(number) + job.state.progress.skipped, epoch, plan.learning_rate(epoch),
                plan.step_momentum(number), phase.global_batch_size, phase.micro_batch_size,
                is_timed or job.settings.run.timeline is not None, number + 1 == interval.end)
