"""Layer by layer, as in table 4 of arXiv:1708.03888."""
import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import model_zoo
import optim
from distributed.exchange import GradientExchange
from distributed.optimizer import build, wrap
from optim.lars import LARS
from training.layer_statistics import LayerStatistics, names_alone
from training.state import Totals
from training.step import StepInput, StepParts, make_train_step


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


def first_step(name, image_size, batch):
    """(variable -> [weight norm, gradient norm, trust ratio]) at the first step, weights before it, gradients of it."""
    random = np.random.default_rng(0)
    images = random.normal(size=(batch, image_size, image_size, 3)).astype(np.float32)
    labels = random.integers(0, 10, size=(batch, 1))
    model = model_zoo.create_model(name, 10, image_size, seed=2)
    optimizer = wrap(LARS(0.0, weight_decay=5e-4))
    build(optimizer, model.trainable_variables)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels[:, 0], model(images)))
    gradients = [g.numpy().astype(np.float64) for g in tape.gradient(loss, model.trainable_variables)]
    weights = [v.numpy().astype(np.float64) for v in model.trainable_variables]
    layers = LayerStatistics(optimizer, model.trainable_variables)
    batches = iter(tf.data.Dataset.from_tensors((images, labels)))
    step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(), layers=layers))
    step(batches, StepInput.of(1.0, 0.9))
    return layers.collect(), weights, gradients


def test_norms_and_ratios_against_numpy():
    collected, weights, gradients = first_step("convnet", 16, 32)
    for (name, (w, g, ratio)), weight, gradient in zip(collected.items(), weights, gradients, strict=True):
        w_norm, g_norm = np.linalg.norm(weight), np.linalg.norm(gradient)
        assert w == pytest.approx(w_norm, rel=1e-4, abs=1e-7), name
        assert g == pytest.approx(g_norm, rel=1e-3), name
        assert ratio == pytest.approx(0.001 * w_norm / (g_norm + 5e-4 * w_norm) if w_norm else 1, rel=1e-3), name


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_only_lars_has_trust_ratios(name):
    model = model_zoo.create_model("convnet", 10, 16, seed=2)
    optimizer = wrap(optim.create_optimizer(
        name, 0.0, momentum=0.9, weight_decay=5e-4, trust_coefficient=0.001, epsilon=0.0, exclude=()))
    build(optimizer, model.trainable_variables)
    layers = LayerStatistics(optimizer, model.trainable_variables)
    layers.record(tf.ones([len(model.trainable_variables)]))
    kernel, has_ratio = next(iter(layers.collect().values())), name == "lars"
    assert kernel[:2] == pytest.approx([np.linalg.norm(model.trainable_variables[0]), 1.0], rel=1e-5)
    assert len(kernel) == 2 + has_ratio and ({*layers.ratios()} != {1.0}) == has_ratio


def test_only_the_updates_that_are_asked_for_are_recorded():
    """Their weights are those before the update."""
    model = model_zoo.create_model("convnet", 10, 16, seed=2)
    optimizer = wrap(LARS(0.0, weight_decay=5e-4))
    build(optimizer, model.trainable_variables)
    layers = LayerStatistics(optimizer, model.trainable_variables)
    batches = iter(tf.data.Dataset.from_tensors((tf.ones([2, 16, 16, 3]), tf.zeros([2, 1], tf.int64))).repeat())
    step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(), layers=layers))

    def update(records):
        before = [np.linalg.norm(v.numpy().astype(np.float64)) for v in model.trainable_variables]
        step(batches, StepInput.of(9.0, 0.9, records_layers=records))
        return before, layers.variable.numpy()[:, 0].tolist()

    assert not any(update(False)[1])
    before, recorded = update(True)
    assert recorded == pytest.approx(before, rel=1e-4) and any(recorded)
    assert update(False)[1] == recorded


def test_alexnets_layers_differ_by_more_than_ten_times():
    """Why one rate does not suit all: the paper finds |w| / |g| from 5.76 to 1345 at the first step."""
    collected, *_ = first_step("alexnet", 67, 8)
    ratios = [w / g for w, g, _ in collected.values() if g > 0]
    assert len(ratios) >= 14 and max(ratios) > 10 * min(ratios)


def test_layers_have_the_same_names_whatever_was_built_before():
    """Keras numbers the layers of a process; TensorBoard and the report compare runs by name."""
    names = [names_alone(model_zoo.create_model("resnet20", 10, 16).trainable_variables) for _ in range(2)]
    assert names[0] == names[1] and len({*names[0]}) == len(names[0])
    assert names[0][0] == "conv2d/kernel" and names[0][-1] == "dense/bias" and "conv2d_18/kernel" in names[0]
