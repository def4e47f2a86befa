"""What of a training step would run on a GPU's host, or wait for a copy to it: as TensorFlow's registry has it."""
import os

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from conftest import run

import model_zoo
import optim
from distributed.exchange import GradientExchange
from distributed.float16 import initial_scales
from distributed.optimizer import build, wrap
from plan.flags import parse
from tests.rigs import gpu_placement
from training.batch_norm import Span, norms
from training.build import set_variables
from training.evaluate import make_evaluation_step
from training.layer_statistics import LayerStatistics
from training.state import Totals
from training.step import StepInput, StepParts, make_train_step

HOROVOD = "HorovodGroupedAllreduce"  # has a kernel for GPUs where Horovod is built for them
LOSS_SCALE = {("IsFinite", "If"), ("All", "If"), ("GreaterEqual", "If")}  # Keras's, which decides on the host
LONG = "gradients in float16", "float16", "AlexNet"  # .ci/run makes them after the default tests
CASES = {
    "float32": ("resnet10_narrow", 16, "float32", 2, "none", set()),
    "gradients in float16": ("resnet10_narrow", 16, "float32", 1, "fp16", {("All", "StatelessIf")}),  # exchange again?
    "bfloat16": ("resnet10_narrow", 16, "mixed_bfloat16", 1, "none", set()),
    "float16": ("resnet10_narrow", 16, "mixed_float16", 2, "none", LOSS_SCALE),
    "AlexNet": ("alexnet", 227, "float32", 1, "none", set()),
    "AlexNet with batch norm": ("alexnet_bn", 227, "float32", 1, "none", set()),
}


@pytest.fixture
def batches():
    """A function: an iterator over batches of images of so many pixels a side."""
    def make(size):
        batch = (tf.zeros([4, size, size, 3], tf.uint8), tf.zeros([4, 1], tf.int64))
        return iter(tf.data.Dataset.from_tensors(batch).repeat())

    yield make
    tf.keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.trainings) if case in LONG else case
                                  for case in CASES])
def test_a_step_runs_on_the_gpu_and_waits_for_no_copy(case, batches, monkeypatch):
    name, size, precision, accumulation_steps, compression, copies = CASES[case]
    hvd.init()
    monkeypatch.setattr(hvd, "size", lambda: 2)
    tf.keras.mixed_precision.set_global_policy(precision)
    model = model_zoo.create_model(name, 10, size)
    optimizer = wrap(
        optim.create_optimizer("lars", learning_rate=0.0, momentum=0.9, weight_decay=1e-4, trust_coefficient=0.001,
                               epsilon=0.0, exclude=()),
        loss_scaling=precision == "mixed_float16")
    build(optimizer, model.trainable_variables)
    exchange, layers = GradientExchange(None, compression), LayerStatistics(optimizer, model.trainable_variables)
    exchange.scales = initial_scales(len(model.trainable_variables))
    step = make_train_step(StepParts(model, optimizer, exchange, Totals(), range(accumulation_steps), layers=layers))
    graph = step.get_concrete_function(batches(size), StepInput.of(0.0, 0.0, timed=True)).graph
    assert gpu_placement.on_the_host(graph) - {HOROVOD} == {"PyFunc"}  # the clock
    found = gpu_placement.copies_to_the_host(graph)
    assert {pair for pair in found if pair[1] != HOROVOD} - {("Reshape", "PyFunc")} == copies


@pytest.mark.parametrize(("flags", "groups", "times"), [
    (["--precision=float32"], 1, 5), (["--precision=mixed_float16"], 2, 0), (["--precision=mixed_bfloat16"], 1, 0),
    (["--precision=mixed_float16", "--nopersistent_batch_norm"], 2, 5)])
def test_batch_norm_transposes_nothing_in_16_bits(flags, groups, times, batches, monkeypatch):
    hvd.init()
    monkeypatch.setattr(os, "environ", {})
    settings = parse(["train.py", *flags])
    set_variables(settings)
    tf.keras.mixed_precision.set_global_policy(settings.recipe.precision)
    model = model_zoo.create_model("resnet10_narrow", 10, 16)
    optimizer = wrap(optim.create_optimizer("sgd", learning_rate=0.0, momentum=0.9))
    build(optimizer, model.trainable_variables)
    step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(), span=Span(groups)))
    graph = step.get_concrete_function(batches(16), StepInput.of(0.0, 0.0)).graph
    assert gpu_placement.hidden_transposes(graph) == len(norms(model)) * times * groups


ARGUMENTS = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from training.results import Step
from training.recovery import Recovery
from types import SimpleNamespace
recovery = SimpleNamespace(_stop=SimpleNamespace(received=False), _is_possible_now=lambda: True)
with tf.device("/cpu:1"):  # stands for a GPU, where TensorFlow would put them
    arguments = tf.nest.flatten(Step(0, 0, 0.0, 0.1, 0.9, 64, 64, True, False).input(Recovery.signals(recovery)))
    print({one.device[-5:] for one in arguments}, tf.constant(1.0).device[-5:])
"""


def test_the_arguments_of_a_step_are_on_the_host():
    assert run("python", 1, "-c", ARGUMENTS).stdout.strip() == "{'CPU:0'} CPU:1"


def test_an_evaluation_runs_on_the_gpu(batches):
    step = make_evaluation_step(model_zoo.create_model("resnet10_narrow", 10, 16))
    graph = step.get_concrete_function(batches(16)).graph
    assert not gpu_placement.on_the_host(graph) and not gpu_placement.copies_to_the_host(graph)


def test_what_would_be_copied_is_found():
    """TensorFlow subtracts int32 on the host, so what was computed on a GPU has to come there."""
    @tf.function(autograph=False)
    def exponents(numbers):
        return tf.bitwise.right_shift(tf.bitcast(numbers * 2, tf.int32), 23) - 127

    graph = exponents.get_concrete_function(tf.TensorSpec([4])).graph
    assert gpu_placement.copies_to_the_host(graph) == {("RightShift", "Sub")}

    @tf.function(autograph=False)
    def called(numbers):
        return tf.numpy_function(lambda one: one, [numbers * 2], tf.float32)

    graph = called.get_concrete_function(tf.TensorSpec([4])).graph
    assert gpu_placement.on_the_host(graph) == {"PyFunc"} and gpu_placement.copies_to_the_host(graph) == {
        ("Mul", "PyFunc")}
