"""One update, against the same update of the full batch, and hand-computed losses."""
import functools

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import model_zoo
import optim
from data.mixing import Mixing
from data.synthetic import Resident
from distributed.exchange import GradientExchange
from distributed.optimizer import build, wrap
from launch.topology import StepWork
from model_zoo.cost import counted
from model_zoo.layers import trained_variables
from plan.plan import make_plan
from plan.settings import Recipe
from tests.rigs.launches import launched
from training.batch_norm import MovingStatistics
from training.losses import balancing_weights, binary_cross_entropy, cross_entropy, label_ranks, make_loss
from training.state import Totals
from training.step import StepInput, StepParts, StepResult, make_train_step


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


@functools.cache
def trained(accumulation_steps, optimizer, xla=False):
    """The weights of a small network after 4 updates on 32 samples each, in so many micro-batches."""
    random = np.random.default_rng(0)
    images = random.normal(size=(128, 8, 8, 3)).astype(np.float32)
    labels = random.integers(0, 4, size=(128, 1))
    batches = iter(tf.data.Dataset.from_tensor_slices((images, labels)).batch(32 // accumulation_steps, True))
    model = model_zoo.create_model("convnet", 4, 8, seed=1)
    wrapped = wrap(optim.create_optimizer(
        optimizer, 0.0, momentum=0.9, weight_decay=1e-4, trust_coefficient=0.001, epsilon=0.0, exclude=(),
        jit_compile=xla))
    build(wrapped, model.trainable_variables)
    totals = Totals()
    step = make_train_step(StepParts(model, wrapped, GradientExchange(), totals, range(accumulation_steps),
                                     loss=make_loss("cross_entropy", 0.1), xla=xla))
    for _ in range(4):
        step(batches, StepInput.of(0.05 if optimizer != "lars" else 5.0, 0.9))
    assert int(wrapped.iterations) == 4
    return [v.numpy() for v in model.variables], totals.collect()


@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_accumulation_is_one_large_batch(optimizer):
    expected, expected_totals = trained(1, optimizer)
    for accumulation_steps in (2, 4):
        parts, totals = trained(accumulation_steps, optimizer)
        for a, b in zip(expected, parts, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)
        assert totals["samples"] == 128 and totals["loss"] == pytest.approx(expected_totals["loss"], rel=1e-4)


def test_an_optimizer_of_keras_keeps_its_own_momentum(monkeypatch):
    """It is a number there, which no step can assign. Against our SGD, whose weight decay moves w by 2e-5 * w."""
    monkeypatch.setitem(optim.OPTIMIZERS, "keras", optim.OptimizerInfo("keras.optimizers", "SGD", ("momentum",)))
    for a, b in zip(trained(1, "keras")[0], trained(1, "sgd")[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_a_constraint_holds_after_each_update(optimizer, xla, monkeypatch):
    """Keras's UnitNorm, of which each filter has a norm of 1; the rate is 0.05 or 5."""
    def created(*_, seed):
        start = tf.keras.initializers.Orthogonal(seed=seed)
        return tf.keras.Sequential([
            tf.keras.layers.Conv2D(4, 8, input_shape=(8, 8, 3), kernel_initializer=start,
                                   kernel_constraint=tf.keras.constraints.UnitNorm((0, 1, 2))),
            tf.keras.layers.Flatten()])

    start = created(seed=1).trainable_variables[0].numpy()
    monkeypatch.setattr(model_zoo, "create_model", created)
    kernel = trained(2, optimizer, xla)[0][0]
    np.testing.assert_allclose(np.square(kernel).sum(axis=(0, 1, 2)), 1, rtol=1e-5)
    assert np.abs(kernel - start).max() > 1e-3


@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_xla_computes_the_same(optimizer):
    for a, b in zip(trained(2, optimizer)[0], trained(2, optimizer, xla=True)[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)


@functools.cache
def resnet50(precision):
    """Of a global policy that is this precision."""
    return model_zoo.create_model("resnet50", 1000, 224)


@pytest.mark.parametrize(("precision", "xla", "most"), [
    ("float32", False, 410), ("float32", True, 150), *(
        pytest.param("mixed_float16", xla, most, marks=pytest.mark.trainings) for xla, most in (
            (False, 430), (True, 150)))])
def test_a_step_launches_few_operations_outside_the_model(precision, xla, most, monkeypatch):
    """ResNet-50 with LARS as one of 8 workers; there were 778 and 930, and each takes a GPU 3 to 7 microseconds."""
    tf.keras.mixed_precision.set_global_policy(precision)
    try:
        model = resnet50(precision)
        optimizer = wrap(optim.create_optimizer(
            "lars", 0.0, momentum=0.9, weight_decay=5e-5, trust_coefficient=0.001, epsilon=0.0,
            exclude=("gamma", "beta", "bias"), jit_compile=xla), loss_scaling=precision == "mixed_float16")
        build(optimizer, model.trainable_variables)
        monkeypatch.setattr(hvd, "size", lambda: 8)
        step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(),
                                         moving=MovingStatistics(model), xla=xla))
        batch = Resident((tf.zeros((4, 224, 224, 3), tf.uint8), tf.zeros((4, 1), tf.int64)))
        traced = step.get_concrete_function(batch, StepInput.of(0.0, 0.9))
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    assert launched(traced.graph) <= most


def test_a_tie_is_a_miss_and_so_is_nan():
    labels = tf.constant([1, 1, 1, 1, 0])
    logits = tf.constant([[0.0, 2.0, 1.0], [2.0, 2.0, 1.0], [1.0, 1.0, 1.0], [0.0, np.nan, 1.0], [1.0, 0.0, np.nan]])
    assert (label_ranks(logits, labels) < 1).numpy().tolist() == [True, False, False, False, False]
    assert (label_ranks(logits, labels) < 2).numpy().tolist() == [True, True, False, False, False]
    assert not (label_ranks(tf.zeros([4, 1000]), tf.constant([0, 1, 5, 999])) < 5).numpy().any()  # a dead network


@pytest.mark.parametrize("k", [1, 5])
def test_hits_are_those_of_a_sort(k):
    random = np.random.default_rng(k)
    logits, labels = random.normal(size=(500, 20)).astype(np.float32), random.integers(0, 20, 500)
    expected = [label in row.argsort()[-k:] for row, label in zip(logits, labels, strict=True)]
    assert (label_ranks(tf.constant(logits), tf.constant(labels)) < k).numpy().tolist() == expected


def test_cross_entropy_by_hand():
    """Three classes, logits log(0.7), log(0.2), log(0.1), label 0."""
    logits = tf.math.log([[0.7, 0.2, 0.1]])
    assert float(cross_entropy(logits, tf.constant([0]))[0]) == pytest.approx(-np.log(0.7), rel=1e-6)
    smoothed = -(0.9 + 0.1 / 3) * np.log(0.7) - 0.1 / 3 * (np.log(0.2) + np.log(0.1))
    assert float(cross_entropy(logits, tf.constant([0]), label_smoothing=0.1)[0]) == pytest.approx(smoothed, rel=1e-6)


def test_totals_are_means_over_the_samples_of_all_updates():
    totals = Totals()
    for loss, hits, samples in ((3.0, 1, 2), (9.0, 16_777_215, 16_777_216)):
        totals.add(tf.constant([loss, hits, samples]))
    assert totals.collect() == {"loss": 12 / 16_777_218, "top1": 16_777_216 / 16_777_218, "samples": 16_777_218}
    totals.add(tf.constant([1.0, 1, 1]))
    assert totals.collect() == {"loss": 1, "top1": 1, "samples": 1}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_mixed", [True, False])
def test_binary_cross_entropy_against_float64(is_mixed, label_smoothing, dtype):
    """Loss and gradient, also of large logits: the mean of log(1 + exp(x)) - t x, and (sigmoid(x) - t) / classes.

    With smoothing, a class needs a share of (0.2 - 0.1 / 40) / 0.9 = 0.219.
    """
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(64, 40)).astype(dtype) * 30, random.integers(0, 40, 64)
    numbers = Mixing(0.4, 1.0).random_numbers(8, 0, np.arange(64))
    share, one_hot = numbers[:, 1:2].astype(np.float64), np.eye(40)[labels]
    shares = share * one_hot + (1 - share) * one_hot[np.arange(64) ^ 1] if is_mixed else one_hot
    targets = ((1 - label_smoothing) * shares + label_smoothing / 40 > 0.2).astype(np.float64)
    assert {*targets.sum(axis=1)} == ({1, 2} if is_mixed else {1})
    wide = logits.astype(np.float64)
    with tf.GradientTape() as tape:
        inputs = tf.constant(logits)
        tape.watch(inputs)
        found = binary_cross_entropy(inputs, tf.constant(labels), tf.constant(numbers) if is_mixed else None,
                                     label_smoothing)
    np.testing.assert_allclose(found, (np.logaddexp(0, wide) - targets * wide).mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(tape.gradient(found, inputs), (1 / (1 + np.exp(-wide)) - targets) / 40, atol={
        "float32": 1e-6, "float16": 2e-4}[dtype])
    assert found.dtype == tf.float32


@pytest.mark.parametrize("freeze", [False, True])
def test_the_forecast_counts_what_a_step_sends_besides_gradients(freeze):
    class Counted(GradientExchange):
        def sum(self, tensors, name):
            sent.append(sum(tensor.shape.num_elements() for tensor in tensors))
            return super().sum(tensors, name)

    sent, model = [], model_zoo.create_model("convnet_bn", 10, 16)
    optimizer = wrap(optim.create_optimizer("sgd", 0.0, momentum=0.9, weight_decay=0.0, exclude=()))
    build(optimizer, trained_variables(model, freeze))
    step = make_train_step(StepParts(model, optimizer, Counted(), Totals(), freeze=freeze,
                                     moving=None if freeze else MovingStatistics(model)))
    batch = Resident((tf.zeros((4, 16, 16, 3), tf.uint8), tf.zeros((4, 1), tf.int64)))
    step.get_concrete_function(batch, StepInput.of(0.0, 0.9))
    phase = make_plan(Recipe(), None, 1, 1000).phases[0]
    assert [4 * numbers for numbers in sent] == [StepWork.of(counted(model), phase, Recipe(freeze=freeze), 4).results]


def test_class_weights_by_hand():
    """8, 2 and 4 images: their inverses are 1/8, 1/2 and 1/4, of which 14 images have 3 in all. Roots likewise."""
    images = np.array([8, 2, 4])
    np.testing.assert_allclose(balancing_weights(images, 1.0), [14 / 24, 14 / 6, 14 / 12], rtol=1e-6)
    roots = 14 / (8 ** 0.5 + 2 ** 0.5 + 2) / np.array([8 ** 0.5, 2 ** 0.5, 2])
    np.testing.assert_allclose(balancing_weights(images, 0.5), roots, rtol=1e-6)
    assert np.isfinite(balancing_weights(np.array([3, 0, 5]), 1.0)).all()


@pytest.mark.parametrize("is_mixed", [True, False])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss_name", ["cross_entropy", "binary_cross_entropy"])
def test_weighted_losses_against_float64(loss_name, label_smoothing, is_mixed):
    """Loss and gradient. Of a mixed image, each label's cross-entropy has its weight; the binary loss has their mean.
    """
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(64, 5)).astype(np.float32), random.integers(0, 5, 64)
    weights = np.array([0.25, 4, 1, 0.5, 2], np.float32)
    numbers = Mixing(0.4, 1.0).random_numbers(8, 0, np.arange(64))
    share = numbers[:, 1].astype(np.float64) if is_mixed else np.ones(64)
    partners, wide = labels[np.arange(64) ^ 1], logits.astype(np.float64)
    smoothed = (1 - label_smoothing) * np.eye(5) + label_smoothing / 5
    if loss_name == "cross_entropy":
        shares = (share * weights[labels])[:, None] * smoothed[labels] + (
            (1 - share) * weights[partners])[:, None] * smoothed[partners]
        logs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        expected = -(shares * logs).sum(axis=1)
        gradient = shares.sum(axis=1, keepdims=True) * np.exp(logs) - shares
    else:
        targets = (share[:, None] * smoothed[labels] + (1 - share)[:, None] * smoothed[partners] > 0.2).astype(float)
        weight = share * weights[labels] + (1 - share) * weights[partners]
        expected = weight * (np.logaddexp(0, wide) - targets * wide).mean(axis=1)
        gradient = weight[:, None] * (1 / (1 + np.exp(-wide)) - targets) / 5
    with tf.GradientTape() as tape:
        inputs = tf.constant(logits)
        tape.watch(inputs)
        found = make_loss(loss_name, label_smoothing, weights)(
            inputs, tf.constant(labels), tf.constant(numbers) if is_mixed else None)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(tape.gradient(found, inputs), gradient, atol=2e-6)


@pytest.mark.parametrize("loss_name", ["cross_entropy", "binary_cross_entropy"])
def test_mixed_labels_are_the_loss_of_soft_labels(loss_name):
    """One SGD update on mixed images, against Keras's loss of soft labels that NumPy has mixed.

    Those of the binary loss are 1 for a class with a share above 0.2.
    """
    random = np.random.default_rng(0)
    images = random.integers(0, 256, size=(16, 8, 8, 3)).astype(np.uint8)
    labels, numbers = random.integers(0, 4, size=(16, 1)), Mixing(0.4, 1.0).random_numbers(8, 0, np.arange(16))
    assert 0 < (numbers[:, 4] > 0).mean() < 1  # both kinds of pairs
    model, twin = (model_zoo.create_model("convnet", 4, 8, seed=1, std=(255.0,) * 3) for _ in range(2))
    optimizer = wrap(optim.create_optimizer(
        "sgd", 0.0, momentum=0.0, weight_decay=0.0, trust_coefficient=0.0, epsilon=0.0, exclude=()))
    build(optimizer, model.trainable_variables)
    totals = Totals()
    step = make_train_step(StepParts(model, optimizer, GradientExchange(), totals, range(2),
                                     loss=make_loss(loss_name, 0.1)))
    batches = tf.data.Dataset.from_tensor_slices((images, labels, numbers)).batch(8)
    learned = StepResult.unpacked(step(iter(batches), StepInput.of(0.5, 0.0)).numpy(),
                                  StepResult.shapes(len(model.trainable_variables)))

    other, down, across = np.arange(16) ^ 1, np.arange(8)[:, None], np.arange(8)[None]
    own = np.ones((16, 8, 8, 1)) * numbers[:, 0, None, None, None]
    for number, (*_, top, left, bottom, right) in enumerate(numbers):
        own[number, (down >= top) & (down < bottom) & (across >= left) & (across < right)] = 0
    weight, one_hot = numbers[:, 1:2], np.eye(4)[labels[:, 0]]
    targets = weight * one_hot + (1 - weight) * one_hot[other]
    with tf.GradientTape() as tape:
        logits = twin((own * images + (1 - own) * images[other]).astype(np.float32), training=True)
        if loss_name == "cross_entropy":
            losses = tf.keras.losses.categorical_crossentropy(targets, logits, from_logits=True, label_smoothing=0.1)
        else:
            present = (0.9 * targets + 0.1 / 4 > 0.2).astype(np.float32)
            losses = tf.keras.losses.binary_crossentropy(present, logits, from_logits=True)
        loss = tf.reduce_mean(losses)
    for variable, gradient in zip(twin.trainable_variables, tape.gradient(loss, twin.trainable_variables), strict=True):
        variable.assign_sub(0.5 * gradient)
    for a, b in zip(model.variables, twin.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
    dominant = np.where(weight[:, 0] >= 0.5, labels[:, 0], labels[other, 0])
    assert learned.loss == pytest.approx(float(loss), rel=1e-5)
    assert learned.top1 == pytest.approx(float(np.mean(np.argmax(logits, 1) == dominant)))
    assert totals.collect()["loss"] == pytest.approx(float(loss), rel=1e-5)
