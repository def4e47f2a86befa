"""A step, and its results, which arrive while the next step runs."""
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import tensorflow as tf

from common.activity import OBSERVERS, activity
from data.staging.spool import Admitted
from training.breakdown import SlowWorkers, StepTimes
from training.build import Setup
from training.divergence import Diverged
from training.observer import Observer, Update
from training.step import NO_SIGNALS, Signals, StepInput, StepResult


@dataclass(frozen=True)
class Step:
    """An update of the weights."""

    number: int  # index in the whole training, from 0
    position: int  # of its first sample in the stream
    epoch: float
    learning_rate: float
    momentum: float
    batch_size: int
    micro_batch_size: int
    timed: bool  # whether it measures its waiting times
    is_last: bool  # whether it is the last of its interval

    def input(self, signals: Signals) -> StepInput:
        """Returns the input of the compiled step. It records statistics of layers only if they are read after it."""
        return StepInput.of(self.learning_rate, self.momentum, self.timed, self.position, signals,
                            records_layers=self.is_last or not self.number)


class Results(AbstractContextManager):
    """Context manager for the results of the steps that were launched.

    A thread copies each result to the host. It requests the copy right after the launch of the step: TensorFlow's copy
    waits for all operations that a GPU has queued by then, so a later request would wait for the next step, too.
    """

    def __init__(self, setup: Setup, observers: Sequence[Observer] = ()):
        self.observers = observers
        self.times = StepTimes()
        self.slow = SlowWorkers()
        self._setup = setup
        self._pending = deque()  # steps that were launched but have no results yet, oldest first
        self._reader = ThreadPoolExecutor(1, "results")
        self._shapes = StepResult.shapes(len(setup.state.trained), setup.state.noise is not None)

    def __exit__(self, *_):
        self._reader.shutdown(wait=False, cancel_futures=True)

    def add(self, step: Step, packed: tf.Tensor, launched: float, admitted: Admitted) -> None:
        """Adds a step that was launched. packed: its result. launched: when, in seconds. admitted: what it read."""
        self._pending.append((step, launched, admitted.seconds, self._reader.submit(packed.numpy)))

    def settle(self, leaving: int = 0) -> Signals:
        """Waits for the results of all steps except the last `leaving`, and notifies the observers.

        Returns the signals that any worker has set in these steps. Raises Diverged for the first step that diverged, on
        all workers at once; observers see that step if its loss is a number. An observer's exception is raised on rank
        0 alone, which ends the job (distributed.lost); UserObserver lets none through.
        """
        setup, noise = self._setup, self._setup.state.noise
        signals = NO_SIGNALS
        while len(self._pending) > leaving:
            step, launched, storage, packed = self._pending.popleft()
            result = StepResult.unpacked(packed.result(), self._shapes)
            seconds = time.perf_counter() - launched
            data, exchange = result.waited
            waits = self.times.add_timed(seconds, (data + storage, exchange)) if step.timed else {}
            if noise:
                noise.add(step.batch_size, step.micro_batch_size, result.norms, result.squares)
            problem = setup.divergence(result.loss, result.norms)
            update = Update(
                step.number, step.epoch, batch_size=step.batch_size, learning_rate=step.learning_rate,
                momentum=step.momentum, loss=result.loss, top1=result.top1, waits=waits,
                layers={} if step.number else setup.layers())
            if not problem or math.isfinite(result.loss):
                with activity.during(OBSERVERS):
                    for observer in self.observers:
                        observer.step(update)
            if problem:
                raise Diverged(problem, step.number, step.epoch, step.learning_rate)
            signals |= Signals(*result.signals)
        return signals

