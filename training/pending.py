"""Steps that were launched and whose results are not known yet: the device works while the host prepares the next."""
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from training.breakdown import StepTimes, on_host
from training.build import Job
from training.divergence import Diverged
from training.step import NO_SIGNALS, Learned


@dataclass(frozen=True)
class Step:
    """An update of the weights. number: from 0, of the whole training. timed: whether it measures what it waits for.

    began: when it was launched.
    """

    number: int
    epoch: float
    learning_rate: float
    momentum: float
    batch_size: int
    timed: bool
    began: float = field(default_factory=time.perf_counter)

    @property
    def arguments(self) -> tuple[tf.Tensor, ...]:
        """What a compiled step takes, but for its data and its signals."""
        return (*(tf.constant(number, tf.float32) for number in (self.learning_rate, self.momentum)),
                on_host(self.timed))


class Pending:
    """The steps under way, oldest first. A context: nothing is left to a thread after it.

    A thread copies each result to the host, and is asked to right after its step was launched: TensorFlow's copy waits
    for all that a GPU was given before, so one asked for later would wait for the next step, too.
    """

    def __init__(self, job: Job, observers: Sequence, times: StepTimes):
        self._job, self._observers, self._times = job, observers, times
        self._steps, self._reader = deque(), ThreadPoolExecutor(1, "results")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._reader.shutdown(wait=False, cancel_futures=True)

    def add(self, step: Step, packed: tf.Tensor) -> None:
        """packed: what the step returned."""
        self._steps.append((step, self._reader.submit(packed.numpy)))

    def settle(self, leaving: int = 0) -> np.ndarray:
        """Waits for the results of all steps but the last `leaving`, and tells the observers. Returns their signals.

        Raises Diverged on all workers at once, of the first step that did.
        """
        signals = np.array(NO_SIGNALS)
        while len(self._steps) > leaving:
            step, result = self._steps.popleft()
            learned = Learned.of(result.result())
            if step.timed:
                self._times.add_timed(time.perf_counter() - step.began, learned.waited)
            if problem := self._job.divergence(learned.loss, learned.norms):
                raise Diverged(problem, step.number, step.epoch, step.learning_rate)
            for observer in self._observers:
                observer.step(step.batch_size, self._job.layers() if not step.number else {})
            signals += learned.signals
        return signals
