"""--profile: a profile of some steps of rank 0, for TensorBoard's profile plugin."""
import contextlib

import tensorflow as tf

from common.errors import complain, reason
from plan.run_folder import TENSORBOARD
from training.observer import Observer, RunInfo, Update


class Profile(Observer):
    """Profiles the steps from `first` to `end` (exclusive) into FOLDER/tensorboard.

    The profile starts before the first of them is launched. It stops when the results of the last are there, which can
    be after the launch of the next step. A run that resumes among them profiles the rest.
    """

    def __init__(self, first: int, end: int):
        self._steps = range(first, end)
        self._is_due = True
        self._is_open = False
        self._profiled = []

    def start(self, run: RunInfo) -> None:
        self._folder = run.folder / TENSORBOARD
        if run.progress.step >= self._steps.stop:
            self._give_up(f"training continues after step {run.progress.step}")
        elif run.plan["steps"] <= self._steps.start:
            self._give_up(f"the last step is {run.plan['steps'] - 1}")

    def _give_up(self, why):
        complain(f"warning: --profile={self._steps.start}:{self._steps.stop}: no profile is written, because {why}")
        self._is_due = False

    @contextlib.contextmanager
    def launching(self, number: int):
        """Context manager for the launch of a step. It marks the step in the profile."""
        if self._is_due and number in self._steps:
            tf.profiler.experimental.start(str(self._folder))
            self._is_due = False
            self._is_open = True
        if not (self._is_open and number in self._steps):
            yield
            return
        self._profiled.append(number)
        with tf.profiler.experimental.Trace("train", step_num=number, _r=1):
            yield

    def step(self, update: Update) -> None:
        if self._is_open and update.number >= self._steps[-1]:
            self._stop()

    def close(self) -> None:
        if self._is_open:
            self._stop()
        elif self._is_due:
            self._give_up(f"training ended before step {self._steps.start}")

    def _stop(self):
        self._is_open = False
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            complain(f"warning: the profile could not be written: {reason(error)}")
        else:
            complain(f"profile of steps {self._profiled[0]} to {self._profiled[-1]}: tensorboard "
                     f"--logdir={self._folder}")
