"""What another thread sees of a compiled step that does not end."""
import threading
import time

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import optim
from common.activity import DATA, OTHERS
from distributed.exchange import GradientExchange
from distributed.optimizer import build, wrap
from training.clock import batch_counts
from training.evaluate import make_evaluation_step
from training.state import Totals
from training.step import StepInput, StepParts, make_train_step

COMPUTING = "computing"


class Gates:
    """Points at which a step stops until it is let on."""

    def __init__(self):
        self._reached, self._open = {DATA: threading.Semaphore(0), COMPUTING: threading.Semaphore(0)}, {
            DATA: threading.Semaphore(0), COMPUTING: threading.Semaphore(0)}

    def stop_at(self, what) -> None:
        self._reached[what].release()
        assert self._open[what].acquire(timeout=300)

    def wait_for(self, what) -> None:
        assert self._reached[what].acquire(timeout=300)

    def let_on(self, what) -> None:
        self._open[what].release()


@pytest.fixture
def gates():
    """At the end, all that still stops is let on."""
    gates = Gates()
    yield gates
    for what in (DATA, COMPUTING) * 9:
        gates.let_on(what)


def stops(gates, what, *values):
    """An iterator of these values that stops at a gate for each. It holds no thread of the step, which may have one."""
    def samples():
        while True:
            gates.stop_at(what)
            yield values

    options = tf.data.Options()
    options.threading.private_threadpool_size = 2
    return iter(tf.data.Dataset.from_generator(samples, output_signature=tuple(
        tf.TensorSpec.from_tensor(tf.constant(value)) for value in values)).with_options(options))


@pytest.fixture
def model(gates):
    """It stops in its forward pass, and again in its backward pass."""
    ones = stops(gates, COMPUTING, np.float32(1))

    def stopped(x):
        with tf.control_dependencies([x]):
            return x * next(ones)[0]

    @tf.custom_gradient
    def stopping(x):
        return stopped(x), stopped

    return tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(4), tf.keras.layers.Lambda(stopping),
                                tf.keras.layers.Dense(8)])


@pytest.fixture
def batches(gates):
    return stops(gates, DATA, np.ones([2, 4], np.float32), np.zeros([2, 1], np.int64))


def becomes(look, expected) -> int:
    """The number that grows with progress, as soon as what is seen is this."""
    deadline = time.monotonic() + 300
    while (seen := look())[1] != expected:
        assert time.monotonic() < deadline, (seen, expected)
        time.sleep(0.001)
    return seen[0]


def test_an_update_waits_for_data_computes_and_exchanges(gates, model, batches):
    """With two micro-batches."""
    hvd.init()
    optimizer = wrap(optim.create_optimizer("sgd", learning_rate=0.0, momentum=0.9))
    build(optimizer, model.trainable_variables)
    step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(), range(2)))
    batch_counts().restart()
    running = threading.Thread(target=step, args=(batches, StepInput.of(0.0, 0.9)))
    running.start()
    counts = []
    for _ in range(2):
        gates.wait_for(DATA)
        counts.append(becomes(lambda: batch_counts().in_update(False), DATA))
        gates.let_on(DATA)
        gates.wait_for(COMPUTING)
        counts.append(becomes(lambda: batch_counts().in_update(False), COMPUTING))
        assert batch_counts().in_update(True)[1] == OTHERS and batch_counts().in_evaluation()[1] is None
        gates.let_on(COMPUTING)
        gates.wait_for(COMPUTING)
        assert batch_counts().in_update(False) == (counts[-1], COMPUTING)
        gates.let_on(COMPUTING)
    running.join(60)
    counts.append(becomes(lambda: batch_counts().in_update(False), OTHERS))
    assert counts == sorted(set(counts))


def test_an_evaluation_waits_for_data(gates, model, batches):
    step = make_evaluation_step(model)
    batch_counts().restart()
    running = threading.Thread(target=step, args=(batches,))
    running.start()
    gates.wait_for(DATA)
    becomes(batch_counts().in_evaluation, DATA)
    gates.let_on(DATA)
    gates.wait_for(COMPUTING)
    becomes(batch_counts().in_evaluation, None)
    gates.let_on(COMPUTING)
    running.join(60)
    assert batch_counts().in_evaluation() == (3, None)
