"""A step and its results, which are known after the next step was launched, and how long steps took."""
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from common.activity import OBSERVERS, activity
from data.staging.spool import Admitted
from training.breakdown import SlowWorkers, StepTimes
from training.build import Job
from training.clock import on_host
from training.divergence import Diverged
from training.observer import Observer, Update
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
        """The arguments of a compiled step, except its data, its signals and `records`."""
        return (on_host(self.learning_rate, tf.float32), on_host(self.momentum, tf.float32), on_host(self.timed),
                on_host(self.position, tf.int64))

    @property
    def records(self) -> tf.Tensor:
        """Whether the step records the statistics of the layers: only the steps after which they are read do."""
        return on_host(self.is_last or not self.number)


class Results:
    """Context manager for the results of the steps that were launched.

    A thread copies each result to the host. The copy is requested right after the launch of its step: TensorFlow's copy
    waits for all operations that were queued on a GPU before, so a later request would wait for the next step, too.
    """

    def __init__(self, job: Job, observers: Sequence[Observer] = ()):
        self.observers = observers
        self.times = StepTimes()
        self.slow = SlowWorkers()
        self._job = job
        self._pending = deque()  # steps that were launched but have no results yet, oldest first
        self._reader = ThreadPoolExecutor(1, "results")
        self._shapes = StepResult.shapes(len(job.state.model.trainable_variables), job.state.noise is not None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._reader.shutdown(wait=False, cancel_futures=True)

    def add(self, step: Step, packed: tf.Tensor, launched: float, admitted: Admitted) -> None:
        """Adds a step that was launched. packed: its result. launched: when, in seconds. admitted: what it read."""
        self._pending.append((step, launched, admitted.seconds, self._reader.submit(packed.numpy)))

    def settle(self, leaving: int = 0) -> np.ndarray:
        """Waits for the results of all steps except the last `leaving`, and notifies the observers.

        Returns the sum of the steps' signals. Raises Diverged for the first step that diverged, on all workers at once.
        """
        job, noise = self._job, self._job.state.noise
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

