"""Updates that a dynamic loss scale skips leave no trace in the next ones, whatever the optimizer."""
import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import model_zoo
import optim
from distributed import optimizer as distributed
from distributed.exchange import GradientExchange
from training.batch_norm import MovingStatistics
from training.state import Totals
from training.step import StepInput, StepParts, apply, average, make_train_step

START = np.array([0.5, -0.25, 1.0], np.float32)
RATE, DECAY = 0.125, 0.0625
# The gradients of a sum are its inputs, exact in float16. With the first loss scale, 2 ** 15, three of each of the
# outliers overflow: 100 up to a scale of 2 ** 9.
ORDINARY = np.random.default_rng(0).integers(-8, 9, (12, 3)) / 16 + 1 / 64
OUTLIER = np.array([100.0, 0.5, -0.25])


def trained(name, inputs, loss_scaling=True):
    """The weights after an update for each input, the number of updates, and the loss scales."""
    hvd.init()
    optimizer = distributed.wrap(optim.create_optimizer(name, RATE, momentum=0.75, weight_decay=DECAY, epsilon=0.0,
                                                        trust_coefficient=0.5), loss_scaling)
    weights, scales = tf.Variable(START, name="dense/kernel"), []
    distributed.build(optimizer, [weights])
    distributed.inner(optimizer).learning_rate.assign(RATE)

    @tf.function(autograph=False)
    def update(x):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.cast(weights, tf.float16) * x)
            loss = distributed.scale(optimizer, tf.cast(total, tf.float32))
        gradients, norms = average(GradientExchange(), optimizer, tape.gradient(loss, [weights]), [weights], 1)
        return apply(optimizer, gradients, norms, [weights])

    updated = 0
    for x in inputs:
        updated += int(update(tf.constant(x, tf.float16)))
        scales.append(float(optimizer.loss_scale) if loss_scaling else 1.0)
    assert int(distributed.inner(optimizer).iterations) == updated
    return weights.numpy(), updated, scales


def adam(gradients, decay):
    """arXiv:1412.6980, algorithm 1, and arXiv:1711.05101, algorithm 2, in float64, with Keras's epsilon."""
    w = START.astype(np.float64)
    m, v = np.zeros(3), np.zeros(3)
    for t, g in enumerate(gradients, 1):
        w -= RATE * decay * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        alpha = RATE * np.sqrt(1 - 0.999 ** t) / (1 - 0.9 ** t)
        w -= alpha * m / (np.sqrt(v) + 1e-7)
    return w


@pytest.mark.parametrize(("name", "decay"), [("adam", 0.0), ("adamw", DECAY)])
def test_adam_corrects_its_bias_for_the_updates_made(name, decay):
    """A skipped update is none, as for PyTorch's GradScaler, which does not call the optimizer."""
    inputs = [*[OUTLIER] * 3, *ORDINARY[:4], *[OUTLIER] * 2, *ORDINARY[4:]]
    weights, updated, scales = trained(name, inputs)
    assert updated == len(ORDINARY) and scales[2] == 2 ** 12 and scales[-1] == 2 ** 10
    np.testing.assert_allclose(weights, adam(ORDINARY, decay), rtol=1e-4)  # Keras: 1 - 0.999 ** t in float32
    counted, _, _ = trained(name, ORDINARY)
    assert weights.tolist() == counted.tolist()


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_a_skipped_update_changes_nothing(name):
    weights, updated, scales = trained(name, [ORDINARY[0], OUTLIER, *ORDINARY[1:]])
    expected, _, _ = trained(name, ORDINARY)
    assert updated == len(ORDINARY) and scales[:2] == [2 ** 15, 2 ** 14]
    assert weights.tolist() == expected.tolist()
    unscaled, _, _ = trained(name, ORDINARY, loss_scaling=False)
    np.testing.assert_allclose(weights, unscaled, rtol=1e-6)


CLIP = 0.75  # of updates whose gradients have norms of 1.3, 0.4 and so on
BOTH = [np.random.default_rng(1).normal(size=(2, 3)) * scale for scale in (0.5, 0.15, 2.0, 0.3)]


def clipped(trust):
    """SGD, or with a trust coefficient LARS, of two weights in float64; the gradients of both are clipped together."""
    weights, buffers = [START.astype(np.float64), 2 * START[::-1].astype(np.float64)], [np.zeros(3), np.zeros(3)]
    for gradients in BOTH:
        share = min(1, CLIP / np.sqrt((gradients ** 2).sum()))
        for number, gradient in enumerate(share * gradients):
            w = weights[number]
            ratio = trust * np.linalg.norm(w) / (np.linalg.norm(gradient) + DECAY * np.linalg.norm(w)) if trust else 1
            buffers[number] = 0.75 * buffers[number] + RATE * ratio * (gradient + DECAY * w)
            weights[number] = w - buffers[number]
    return weights


@pytest.mark.parametrize("loss_scaling", [False, True])
@pytest.mark.parametrize(("name", "trust"), [("sgd", 0), ("lars", 0.5)])
def test_gradients_are_clipped_by_the_norm_of_all_of_them(name, trust, loss_scaling):
    """With a loss scale, by that of the unscaled ones; an update that overflows is still skipped."""
    hvd.init()
    assert {np.linalg.norm(one) > CLIP for one in BOTH} == {True, False}
    optimizer = distributed.wrap(optim.create_optimizer(name, RATE, momentum=0.75, weight_decay=DECAY, epsilon=0.0,
                                                        trust_coefficient=trust), loss_scaling)
    weights = [tf.Variable(START, name="one/kernel"), tf.Variable(2 * START[::-1], name="two/kernel")]
    distributed.build(optimizer, weights)
    distributed.inner(optimizer).learning_rate.assign(RATE)
    overflow = [np.full((2, 3), np.inf)] * loss_scaling
    for inputs in (*BOTH[:2], *overflow, *BOTH[2:]):
        gradients = [tf.constant(x, tf.float32) * distributed.scale(optimizer, tf.constant(1.0)) for x in inputs]
        before = [weight.numpy() for weight in weights]
        scaled, norms = average(GradientExchange(), optimizer, gradients, weights, 1)
        updates = bool(apply(optimizer, scaled, norms, weights, CLIP))
        assert updates == np.isfinite(inputs).all() != all(map(np.array_equal, before, weights))
    for weight, expected in zip(weights, clipped(trust), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=2e-6)


def test_a_skipped_update_moves_no_statistics():
    """The next one is then the first, and gives the moving statistics its own."""
    hvd.init()
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = model_zoo.create_model("resnet20", 4, 8, seed=1)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    optimizer = distributed.wrap(optim.create_optimizer("sgd", 0.0), loss_scaling=True)
    distributed.build(optimizer, model.trainable_variables)
    moving, totals = MovingStatistics(model), Totals()
    step = make_train_step(StepParts(model, optimizer, GradientExchange(), totals, moving=moving))
    random = np.random.default_rng(0)
    images, labels = random.uniform(0, 255, (16, 8, 8, 3)).astype(np.float32), random.integers(0, 4, (16, 1))
    batches = iter(tf.data.Dataset.from_tensors((images, labels)).repeat())
    layer = next(layer for layer in model.layers if isinstance(layer, tf.keras.layers.BatchNormalization))
    optimizer._loss_scale.current_loss_scale.assign(2.0 ** 60)  # the backward pass overflows, the forward pass does not
    step(batches, StepInput.of(0.0, 0.0))
    moving.write()
    assert float(optimizer.loss_scale) == 2.0 ** 59 and np.isfinite(totals.collect()["loss"])
    assert not layer.moving_mean.numpy().any() and (layer.moving_variance.numpy() == 1).all()
    optimizer._loss_scale.current_loss_scale.assign(1.0)
    step(batches, StepInput.of(0.0, 0.0))
    moving.write()
    inputs = tf.keras.Model(model.inputs, layer.input)(images, training=True).numpy().astype(np.float64)
    np.testing.assert_allclose(layer.moving_mean, inputs.mean((0, 1, 2)), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(layer.moving_variance, inputs.var((0, 1, 2), ddof=1), rtol=1e-2)
