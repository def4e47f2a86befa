"""Steps that were launched but have no results yet. The device runs them while the host prepares the next step."""
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from reporting.observer import Update
from training.breakdown import StepTimes, on_host
from training.build import Job
from training.divergence import Diverged, WeightsDiffer
from training.noise_scale import NoiseScale
from training.state import named
from training.step import NO_SIGNALS, StepResult
from training.weight_check import differ, differing_weights


@dataclass(frozen=True)
class Step:
    """An update of the weights.

    number: index in the whole training, from 0. position: that of its first sample in the stream. timed: whether it
    measures its waiting times.
    """

    number: int
    position: int
    epoch: float
    learning_rate: float
    momentum: float
    batch_size: int
    micro_batch_size: int
    timed: bool

    @property
    def arguments(self) -> tuple[tf.Tensor, ...]:
        """The arguments of a compiled step, except its data and its signals."""
        return (*(on_host(number, tf.float32) for number in (self.learning_rate, self.momentum)), on_host(self.timed),
                on_host(self.position, tf.int64))


class Pending:
    """Context manager for the pending steps, oldest first. On exit, it cancels the remaining copies.

    The host is one step ahead of the device. Only a timed step runs alone, and the results of the first step of all and
    of the last step of an interval are known before anything else happens.

    A thread copies each result to the host. The copy is requested right after the launch of its step: TensorFlow's copy
    waits for all operations that were queued on a GPU before, so a later request would wait for the next step, too.
    """

    def __init__(self, job: Job, observers: Sequence, times: StepTimes, noise: NoiseScale):
        self._job = job
        self._observers = observers
        self._times = times
        self._noise = noise
        self._equal_after = None  # step after which all workers had the same weights
        self._steps = deque()
        self._reader = ThreadPoolExecutor(1, "results")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._reader.shutdown(wait=False, cancel_futures=True)

    def settle_before(self, step: Step) -> np.ndarray:
        """Waits for the results that have to be known before a step is launched; returns the sum of their signals."""
        return self.settle(leaving=0 if step.timed else 1)

    def add(self, step: Step, packed: tf.Tensor, began: float, is_last: bool, waited: float = 0.0) -> np.ndarray:
        """Adds a step that was launched, and waits for the results that have to be known before anything else.

        packed: the step's result, which training.step.StepResult unpacks. began: time of the launch, in seconds.
        is_last: whether the step is the last of its interval. waited: seconds that it waited for data before that.
        Returns the sum of the signals of the results.
        """
        self._steps.append((step, began, waited, self._reader.submit(packed.numpy)))
        return self.settle(leaving=0 if step.timed or is_last or not step.number else 1)

    def settle(self, leaving: int = 0) -> np.ndarray:
        """Waits for the results of all steps except the last `leaving`, and notifies the observers.

        Returns the sum of the steps' signals. Raises Diverged for the first step that diverged, on all workers at once.
        """
        signals = np.array(NO_SIGNALS)
        while len(self._steps) > leaving:
            step, began, waited, result = self._steps.popleft()
            found = StepResult.unpack(result.result(), self._job.settings.run.log_noise_scale)
            seconds = time.perf_counter() - began
            waits = self._times.add_timed(seconds, found.waited + np.array([waited, 0])) if step.timed else {}
            if len(found.squares):
                self._noise.add(step.batch_size, step.micro_batch_size, found.norms, found.squares)
            if problem := self._job.divergence(found.loss, found.norms):
                raise Diverged(problem, step.number, step.epoch, step.learning_rate)
            if differ(found.digits, self._job.world.size):
                where = differing_weights(self._job.world, named("model", self._job.state.model.variables))
                raise WeightsDiffer(where, step.number, step.epoch, self._equal_after)
            if step.timed:
                self._equal_after = step.number
            for observer in self._observers:
                observer.step(Update(step.number, step.epoch, step.batch_size, step.learning_rate, step.momentum,
                                     found.loss, found.top1, waits, {} if step.number else self._job.layers()))
            signals += found.signals
        return signals
