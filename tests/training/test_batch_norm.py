"""Exact statistics against NumPy over the same batches, and what batch-size control reads on 1 and 2 workers."""
import json

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import model_zoo
from common.errors import UserError
from data import order
from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from distributed.exchange import GradientExchange
from distributed.optimizer import build, wrap
from distributed.world import World
from model_zoo.layers import BatchNormalization, Dropout
from optim.lars import SGD
from plan.plan import Phase
from tests.rigs.plans import plan
from training.batch_norm import ExactStatistics, MovingStatistics, Span
from training.state import Totals
from training.step import StepInput, StepParts, make_train_step


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


def phase(batch_size, micro_batch_size):
    """A phase of one worker, with batch norm over the micro-batch."""
    return Phase(0, 1, batch_size, micro_batch_size, batch_size // micro_batch_size, 1, micro_batch_size)


@pytest.mark.trainings
def test_exact_statistics_are_those_of_the_training_batches(digits):
    feed = Feed(open_dataset(digits), 32, AUGMENTATIONS["none"], seed=3)
    model = model_zoo.create_model("resnet20", 10, 32, seed=1)
    norms = [layer for layer in model.layers if isinstance(layer, tf.keras.layers.BatchNormalization)]
    inputs = tf.keras.Model(model.inputs, [norms[0].input, norms[7].input])
    steps = -(-1437 // 192)
    with feed.train(500, steps, 192, 64) as batches:
        seen = [[x.numpy().astype(np.float64) for x in inputs(next(batches)[0], training=True)]
                for _ in range(3 * steps)]
    ExactStatistics(model, World()).measure(feed, [500], phase(192, 64))
    for layer, values in ((norms[0], [x for x, _ in seen]), (norms[7], [x for _, x in seen])):
        values = np.concatenate(values).reshape(-1, values[0].shape[-1])
        np.testing.assert_allclose(layer.moving_mean, values.mean(axis=0), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(layer.moving_variance, values.var(axis=0), rtol=1e-3, atol=1e-4)


def test_one_large_value_leaves_the_other_statistics_as_they_are(digits):
    """Activations of 1e9, whose squares have no float32 neighbour closer than 1e11, beside those of other layers."""
    feed = Feed(open_dataset(digits), 32, AUGMENTATIONS["none"], seed=3)
    model = model_zoo.create_model("resnet20", 10, 32, seed=1)
    measured = []
    for factor in (1, 1e7):
        model.layers[2].kernel.assign(model.layers[2].kernel * factor)
        ExactStatistics(model, World()).measure(feed, [0], phase(64, 64))
        measured.append([values.numpy() for values in model.non_trainable_variables])
    (mean, variance, *others), (large_mean, large_variance, *same) = measured
    np.testing.assert_allclose(large_mean, mean * 1e7, rtol=1e-4)
    np.testing.assert_allclose(large_variance, variance * 1e14, rtol=1e-4)
    for one, other in zip(others, same, strict=True):  # batch norm undoes the factor, but for epsilon
        np.testing.assert_allclose(one, other, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize(("accumulation", "groups"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_moving_statistics_move_once_per_update(accumulation, groups):
    """Against NumPy in float64: means over the groups of each global batch, weighted by momentum ** age."""
    images = np.random.default_rng(0).gamma(2, size=(3, 32, 4, 4, 3)).astype(np.float32)
    inputs = tf.keras.Input((4, 4, 3))
    outputs = tf.keras.layers.GlobalAveragePooling2D()(BatchNormalization(momentum=0.8)(inputs))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(outputs))
    optimizer = wrap(SGD(0.0))
    build(optimizer, model.trainable_variables)
    moving = MovingStatistics(model)
    step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(), range(accumulation), moving=moving,
                                     span=Span(groups)))
    samples = images.reshape(-1, 4, 4, 3), np.zeros((96, 1), int)
    batches = iter(tf.data.Dataset.from_tensor_slices(samples).batch(32 // accumulation))
    for _ in range(3):
        step(batches, StepInput.of(0.0, 0.9))
    moving.write()
    parts = images.astype(np.float64).reshape(3, accumulation * groups, -1, 3)
    weights = 0.8 ** np.arange(2, -1, -1)[:, None] / (1 + 0.8 + 0.64)
    expected_mean = (weights * parts.mean(axis=2).mean(axis=1)).sum(axis=0)
    expected_variance = (weights * parts.var(axis=2, ddof=1).mean(axis=1)).sum(axis=0)
    np.testing.assert_allclose(model.layers[1].moving_mean, expected_mean, rtol=1e-5)
    np.testing.assert_allclose(model.layers[1].moving_variance, expected_variance, rtol=1e-5)


def test_statistics_of_trained_weights_count_like_any_others():
    model = tf.keras.Sequential([tf.keras.Input((4, 4, 1)), BatchNormalization(momentum=0.9)])
    model.layers[0].moving_mean.assign([5.0])
    moving = MovingStatistics(model, keeps_initial=True)
    moving.move(tf.constant([1.0, 2.0]), updates=tf.constant(0))
    moving.write()
    assert float(model.layers[0].moving_mean[0]) == pytest.approx(0.9 * 5 + 0.1 * 1)
    assert float(model.layers[0].moving_variance[0]) == pytest.approx(0.9 * 1 + 0.1 * 2)


def test_with_momentum_1_they_never_move():
    model = tf.keras.Sequential([tf.keras.Input((4, 4, 1)), BatchNormalization(momentum=1.0)])
    moving = MovingStatistics(model)
    moving.move(tf.constant([5.0, 7.0]), updates=tf.constant(0))
    moving.write()
    assert [float(value[0]) for value in model.layers[0].weights[2:]] == [0, 1]


def test_in_keras_fit_the_layer_moves_its_own_statistics():
    """Against Keras's own layer, on a micro-batch that is not split."""
    images = np.random.default_rng(0).normal(3, size=(16, 4, 4, 2)).astype(np.float32)
    found = []
    for layer in (BatchNormalization(momentum=0.9), tf.keras.layers.BatchNormalization(momentum=0.9)):
        model = tf.keras.Sequential([tf.keras.Input((4, 4, 2)), layer])
        model.compile("sgd", "mse")
        model.fit(images, images, batch_size=8, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_model_without_batch_norm_has_nothing_to_measure(digits):
    model = model_zoo.create_model("convnet", 10, 32)
    feed = Feed(open_dataset(digits), 32, AUGMENTATIONS["none"], seed=3)
    ExactStatistics(model, World()).measure(feed, [0], phase(64, 64))


def test_measuring_is_the_same_with_dropout_each_time(digits):
    """A run that was stopped and resumed there would otherwise go on with other statistics."""
    inputs = tf.keras.Input((32, 32, 3))
    x = BatchNormalization()(tf.cast(inputs, tf.float32))
    model = tf.keras.Model(inputs, BatchNormalization()(Dropout(0.5, seed=1)(x)))
    feed, measured = Feed(open_dataset(digits), 32, AUGMENTATIONS["none"], seed=3), []
    for _ in range(2):
        ExactStatistics(model, World()).measure(feed, [0], phase(64, 64))
        measured.append(model.layers[-1].moving_variance.numpy())
    np.testing.assert_array_equal(*measured)


def test_a_damaged_image_met_while_measuring_is_named(digits, tmp_path):
    number = int(order.stream(open_dataset(digits).train, 3, np.arange(100))[70])  # in the second of two batches
    split, described = open_dataset(digits).train, json.loads((digits / "dataset.json").read_text())
    image, _ = next(split.kind.records(split.paths[0], split.entries[0], [number]))
    for path in digits.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes().replace(image, bytes(len(image))))
    statistics = ExactStatistics(model_zoo.create_model("resnet20", 10, 32), World())
    with pytest.raises(UserError, match="measuring batch-norm statistics stopped: ") as raised:
        statistics.measure(Feed(open_dataset(tmp_path), 32, AUGMENTATIONS["none"], seed=3), [0], phase(64, 64))
    name = described["train"]["files"][0]["path"]
    assert f"{tmp_path}/{name}, record {number} cannot be decoded" in str(raised.value)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_change_of_batch_loses_and_repeats_no_sample(odd_digits, workers):
    """Over each phase: every sample of its epochs once, but for fewer than a batch at its end."""
    split = open_dataset(odd_digits).train
    made = plan(workers, batch_size="0:48,2:96,3:240", epochs=5.0)
    for phase in made.phases:
        read = np.concatenate([
            order.stream(split, 0, interval.start + order.worker_positions(
                split, interval.steps, phase.global_batch_size, shard, workers))
            for interval in made.intervals() if interval.phase is phase for shard in range(workers)])
        epochs = phase.end_epoch - phase.start_epoch
        counts = np.bincount(read, minlength=1437)
        assert 0 <= epochs * 1437 - len(read) < phase.global_batch_size
        assert counts.max() <= epochs and (counts < epochs).sum() <= epochs * 1437 - len(read)
