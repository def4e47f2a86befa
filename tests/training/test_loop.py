"""The host is one step ahead of what it knows: nothing is read between two steps, and nothing wrong is kept."""
import contextlib
import dataclasses
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from unittest import mock

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from common.activity import activity
from common.errors import UserError
from data import synthetic
from distributed.exchange import GradientExchange
from distributed.world import World
from plan import flags
from plan.plan import plan_for
from training import breakdown, build, clock, loop
from training.divergence import Diverged
from training.state import Snapshot, State
from training.step import Signals, StepResult

STEPS = 50  # two epochs of 25 steps


@pytest.fixture
def setup(monkeypatch):
    monkeypatch.setattr(synthetic, "CLASSES", 10)
    hvd.init()
    settings = flags.parse(["train.py", "--model=convnet", "--image_size=8", "--batch_size=4", "--epochs=2",
                            "--data_dir=synthetic:100", "--optimizer=sgd", "--learning_rate=0.001", "--warmup=none"])
    dataset = dataclasses.replace(synthetic.synthetic_dataset("synthetic:100"), classes=tuple("0123456789"))
    model = build.make_model(settings.recipe, dataset)
    state = State(model, build.make_optimizer(settings.recipe, model))
    feed = synthetic.SyntheticFeed(dataset, 8, 0)
    return build.make_setup(settings, plan_for(settings, 1, 1, 100), World(), feed, state, GradientExchange())


class Recovery:
    """What the loop asks of training.recovery, and what it was told."""

    def __init__(self, due=()):
        self._due, self.acted, self.progress = due, [], None

    def signals(self):
        return Signals()

    def stop_is_asked(self):
        return False

    def is_due_after(self, signals):
        return any(signals) or self.progress.step in self._due

    def snapshot(self):
        return Snapshot({}, self.progress, {"model": 0})

    def after_step(self, signals, before_evaluation):
        self.acted.append((self.progress.step, signals, before_evaluation))

    def after_evaluation(self, epoch, top1, outcomes, is_last):
        pass


@contextlib.contextmanager
def waits():
    """Yields a function: whether this thread waits for a future that is not done."""
    thread, awaited, result = threading.get_ident(), [None], Future.result

    def observed(future, timeout=None):
        if threading.get_ident() == thread:
            awaited[0] = future
        return result(future, timeout)

    with mock.patch.object(Future, "result", observed):
        yield lambda: awaited[0] is not None and not awaited[0].done()


def followed(setup, recovery, change=lambda number, result: None):
    """Trains; the numbers of the steps whose results were waited for before the next one was launched.

    Each result comes only when the next step has been launched, or when the loop waits for it. change: sets
    numbers in the result of a step.
    """
    launched, waited, recovery.progress = [threading.Event() for _ in range(STEPS + 1)], [], setup.state.progress
    has_ended = threading.Event()
    recovery.recorded = []  # the numbers of the steps that record the statistics of layers
    trained, shapes = setup.train_step, StepResult.shapes(len(setup.state.model.trainable_variables))

    def train_step(phase):
        def step(iterator, given):
            number, packed = setup.state.progress.step, trained(phase)(iterator, given)
            launched[number].set()
            recovery.recorded += [number] * bool(given.records_layers)

            def result():
                while not launched[number + 1].wait(0.001) and not has_ended.is_set():
                    if is_waiting() and not launched[number + 1].is_set():
                        waited.append(number)
                        break
                vector = packed.numpy().copy()
                change(number, StepResult.unpacked(vector, shapes))  # whose parts are views of the vector
                return vector

            return SimpleNamespace(numpy=result)

        return step

    with waits() as is_waiting:
        try:
            loop.follow_plan(dataclasses.replace(setup, train_step=train_step), recovery)
        finally:
            has_ended.set()
            recovery.waited = sorted(waited)


def test_a_step_is_launched_before_the_result_of_the_one_before_is_known(setup, monkeypatch):
    """But for the first of all, those that are timed with the one before, the last of an epoch and one to be saved."""
    read = []
    monkeypatch.setattr(clock, "_now", lambda value: (read.append(0), clock.np.float64(1.0))[1])
    recovery = Recovery(due={12})
    followed(setup, recovery)
    timed = [1, 7, 13, 19, 26, 32, 38, 44]  # four of the 25 of each epoch
    assert recovery.waited == sorted({0, *timed, *(step - 1 for step in timed), 11, 24, 49})
    assert [step for step, *_ in recovery.acted] == [12]
    assert recovery.recorded == [0, 24, 49]  # after which the statistics of layers are read
    assert len(read) == 4 * len(timed)  # before and after the data, after the gradients, after the exchange


@pytest.mark.parametrize(("first", "end", "timed"), [
    (0, 1, [0]), (0, 2, [1]), (3, 6, [4, 5]), (0, 19, [1, 5, 9, 13, 17]), (100, 200, [101, 121, 141, 161, 181])])
def test_one_step_in_20_is_timed_or_more_of_few(first, end, timed, setup):
    """19 is an epoch of ImageNet with batches of 64K. The first step may have to wait for other workers."""
    def is_timed(number):
        setup.state.progress.step = number
        return loop.next_step(setup, interval, first).timed

    interval = dataclasses.replace(next(setup.plan.intervals()), first_step=0, steps=end)
    assert [number for number in range(first, end) if is_timed(number)] == timed


def test_a_phase_is_traced_once(setup):
    """The learning rate, the position and the signals of each step are other ones, and some steps are timed."""
    recovery, [phase] = Recovery(), setup.plan.phases
    recovery.progress = setup.state.progress
    recovery.signals = lambda: Signals(stop=False, can_save=bool(recovery.progress.step % 2))
    recovery.is_due_after = lambda signals: False
    loop.follow_plan(setup, recovery)
    assert setup.state.progress.step == STEPS and setup.plan.learning_rate(0.0) != setup.plan.learning_rate(1.5)
    assert setup.train_step(phase).experimental_get_tracing_count() == 1


class Reached(Exception):
    """Ends a training in its first step."""


@pytest.mark.parametrize(("span", "expected"), [(4, clock.COMPUTING), (8, clock.OTHERS)])
def test_a_worker_that_computes_may_wait_for_the_statistics_of_its_neighbour(span, expected, setup, monkeypatch):
    """With batch norm over the micro-batches of two workers, whoever still computes need not be the one to blame."""
    def step(*_):
        raise Reached(activity.look()[0])

    monkeypatch.setattr(clock.BatchCounts, "_look", lambda _: (0, False, True))  # a batch has arrived
    phase = dataclasses.replace(setup.plan.phases[0], batch_norm_span=span)
    assert phase.micro_batch_size == 4
    changed = dataclasses.replace(
        setup, plan=dataclasses.replace(setup.plan, phases=(phase,)), train_step=lambda _: step)
    with pytest.raises(Reached, match=f"^{expected}$"):
        loop.follow_plan(changed, Recovery())


def test_a_step_that_diverged_is_reported_before_anything_is_saved(setup):
    """It is step 14, 15 is launched when that is known; a checkpoint is due after 15, 16 in all."""
    def change(number, result):
        if number >= 14:
            result.means[0] = np.nan

    recovery = Recovery(due={16})
    with pytest.raises(Diverged, match="diverged at step 14 ") as problem:
        followed(setup, recovery, change)
    assert problem.value.step == 14 and setup.state.progress.step == 16 and recovery.acted == []


@pytest.mark.parametrize("asked", [14, 24, 49])
def test_a_stop_takes_effect_at_most_a_step_later_with_all_results_known(setup, asked):
    def change(number, result):
        result.signals[:] = Signals(stop=number == asked)

    recovery = Recovery()
    followed(setup, recovery, change)
    [(step, signals, before_evaluation)] = recovery.acted
    assert signals == Signals(stop=True, can_save=False) and step == asked + (1 if asked in (24, 49) else 2)
    assert before_evaluation == (asked in (24, 49))


def exhausted():
    return tf.zeros([2**50])  # 4 PiB: TensorFlow's own error, after it has waited for such memory for 10 s


def refused():
    raise tf.errors.InternalError(None, None, "cuDNN could not start: CUDNN_STATUS_ALLOC_FAILED")  # as on a GPU


@pytest.mark.parametrize("allocate", [pytest.param(exhausted, marks=pytest.mark.trainings), refused])
def test_out_of_memory_is_a_line_that_names_half_of_the_size(setup, allocate):
    full = dataclasses.replace(setup, train_step=lambda phase: lambda *arguments: allocate())
    with pytest.raises(UserError, match=r"ran out of memory; use --micro_batch_size=2 instead of 4$"):
        loop.follow_plan(full, Recovery())


def test_seconds_and_images_are_those_of_all_steps_and_shares_those_of_the_timed():
    times = breakdown.StepTimes()
    for seconds in (1.0, 2.0, 3.0):
        times.add(8, seconds)
    times.add_timed(2.0, [0.5, 0.25])
    assert times.images_per_second() == 4.0
    assert breakdown.breakdown_of(times.gather(World())) == {"compute": 0.625, "data": 0.25, "exchange": 0.125}
    assert breakdown.breakdown_of(times.gather(World())) == {} and times.images_per_second() == 0.0
