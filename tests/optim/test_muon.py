"""Muon against float64 NumPy, written from its sources' formulas."""
import numpy as np
import pytest
import tensorflow as tf
from conftest import DEEP, built

import model_zoo
from model_zoo.whitened_convnet import ConstantNorm
from optim.muon import STACK, Muon, Share, dealt, in_stacks, operations, orthogonalized
from tests.rigs.launches import launched

DECAY, MOMENTUM = 0.1, 0.9
NETWORKS = [*model_zoo.ZOO, *(f"keras:{name}" for name in (
    "ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "EfficientNetV2B0", "InceptionV3", "MobileNet", "MobileNetV2",
    "MobileNetV3Small", "NASNetMobile", "RegNetX002", "RegNetY002", "ResNet50", "ResNetRS50", "VGG16", "Xception"))]
QUICK = "convnet", "resnet10_narrow"  # the others take seconds to build


def rate_at(step):
    return 0.05 * (1 - step / 10)


def newton_schulz(x):
    """K. Jordan 2024, in float64."""
    x = x / np.sqrt((x * x).sum())
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def reference(start, gradients, is_matrix, decay):
    """The weights of one variable: arXiv:2502.16982, section 2.2, or arXiv:1711.05101, algorithm 2.

    Epsilon as in arXiv:1412.6980, at the end of section 2.
    """
    w, m, v = start.astype(np.float64), np.zeros(start.shape), np.zeros(start.shape)
    for step, gradient in enumerate(gradients):
        g, rate = gradient.astype(np.float64), rate_at(step)
        if is_matrix:
            m = MOMENTUM * m + g
            rows = (g + MOMENTUM * m).reshape(-1, start.shape[-1])
            update = 0.2 * np.sqrt(max(rows.shape)) * newton_schulz(rows).reshape(start.shape)
        else:
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            update = np.sqrt(1 - 0.95 ** (step + 1)) / (1 - 0.9 ** (step + 1)) * m / (np.sqrt(v) + 1e-7)
        w = w - rate * (decay * w + update)
    return w


def updated(optimizer, variables, gradients):
    optimizer.build(variables)
    step = tf.function(lambda *given: optimizer.apply_gradients(zip(given, variables, strict=True)), autograph=False)
    for number, given in enumerate(gradients):
        optimizer.learning_rate.assign(rate_at(number))
        step(*given)


def narrow(name, shape):
    """A kernel's shape with at most 40 channels, and more in than out, or fewer, as before."""
    if len(shape) < 2 or name.endswith("depthwise_kernel"):
        return [min(size, 40) for size in shape]
    *window, inputs, outputs = shape
    return [*window, min(inputs, 24 + 16 * (inputs > outputs)), min(outputs, 24 + 16 * (outputs > inputs))]


@pytest.mark.parametrize("network", [
    *QUICK, *(pytest.param(name, marks=pytest.mark.campaign if name in DEEP else pytest.mark.trainings)
              for name in NETWORKS if name not in QUICK)])
def test_each_kind_of_variable_of_each_network(network):
    random = np.random.default_rng(len(network))
    model = model_zoo.create_model(network, 7, model_zoo.MODELS[network].image_size)
    names = [v.name.split(":")[0] for v in model.trainable_variables]
    kinds = {}  # one variable of each kind and shape
    for name, variable in zip(names, model.trainable_variables, strict=True):
        kinds.setdefault((name.rpartition("/")[2], *narrow(name, variable.shape)), name)
    starts = [random.normal(size=shape).astype(np.float32) for _, *shape in kinds]
    variables = [tf.Variable(start, name=name) for start, name in zip(starts, kinds.values(), strict=True)]
    gradients = [[random.normal(size=start.shape).astype(np.float32) * 10.0 ** random.integers(-3, 2)
                  for start in starts] for _ in range(3)]
    updated(Muon(0.0, MOMENTUM, DECAY), variables, gradients)
    for index, ((kind, *shape), variable) in enumerate(zip(kinds, variables, strict=True)):
        is_matrix = kind.endswith("kernel") and kind != "depthwise_kernel" and 1 not in shape[-2:]
        expected = reference(starts[index], [given[index] for given in gradients], is_matrix, DECAY)
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-3, atol=2e-4, err_msg=variable.name)


def test_with_a_constant_norm_each_update_turns_a_kernel_as_in_airbench():
    """There, a kernel is scaled to a norm of root(outputs) before an update of learning_rate * x, without a factor.

    The scales differ, but not the directions; our gradients have the scale that follows from the kernel's.
    """
    random = np.random.default_rng(2)
    starts = [random.normal(size=shape).astype(np.float32) for shape in ((3, 3, 5, 7), (3, 3, 8, 6))]
    norm = ConstantNorm()
    ours = [tf.Variable(norm(tf.constant(start)), name="kernel", constraint=norm) for start in starts]
    theirs = [(start.astype(np.float64), np.zeros(start.shape)) for start in starts]
    gradients = [[random.normal(size=start.shape).astype(np.float32) for start in starts] for _ in range(5)]
    updated(Muon(0.0, MOMENTUM), ours, gradients)
    for step, given in enumerate(gradients):
        for index, ((w, m), g) in enumerate(zip(theirs, given, strict=True)):
            m = MOMENTUM * m + g
            w = w * np.sqrt(w.shape[-1]) / np.linalg.norm(w)
            rows = (g + MOMENTUM * m).reshape(-1, w.shape[-1])
            theirs[index] = w - rate_at(step) * newton_schulz(rows).reshape(w.shape), m
    for variable, (w, _) in zip(ours, theirs, strict=True):
        expected = 0.2 * w / np.sqrt(np.square(w).mean())
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-3, atol=2e-5)


def test_excluded_kernels_have_adam_without_decay():
    random = np.random.default_rng(1)
    starts = [random.normal(size=shape).astype(np.float32) for shape in ((8, 6), (8, 6))]
    variables = [tf.Variable(start, name=name) for start, name in zip(starts, ("a/kernel", "last/kernel"), strict=True)]
    gradients = [[random.normal(size=(8, 6)).astype(np.float32) for _ in starts] for _ in range(4)]
    updated(Muon(0.0, MOMENTUM, DECAY, exclude=("last/kernel",)), variables, gradients)
    for index, (is_matrix, decay) in enumerate(((True, DECAY), (False, 0.0))):
        expected = reference(starts[index], [given[index] for given in gradients], is_matrix, decay)
        np.testing.assert_allclose(variables[index].numpy(), expected, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("shape", [(16, 16), (10, 64), (3, 32, 288), (128, 600)])
def test_singular_values_end_near_1_and_vectors_stay(shape):
    """From a condition number of 30."""
    random = np.random.default_rng(shape[-1])
    left, _, right = np.linalg.svd(random.normal(size=shape), full_matrices=False)
    values = np.geomspace(1, 1 / 30, shape[-2])
    found = orthogonalized(tf.constant(left * values @ right * 1e-4, tf.float32)).numpy()
    inner = np.swapaxes(left, -1, -2) @ found @ np.swapaxes(right, -1, -2)  # diagonal, if the vectors are the same
    diagonal = np.diagonal(inner, axis1=-2, axis2=-1)
    assert diagonal.min() > 0.65 and diagonal.max() < 1.25
    assert np.abs(inner - diagonal[..., None] * np.eye(shape[-2])).max() < 1e-3


def in_tf32(matrix) -> tf.Tensor:
    """Rounds to the 10 bits of mantissa that the tensor cores of an A100 read of float32."""
    return tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(matrix, tf.int32) + 2**12, -(2**13)), tf.float32)


@pytest.mark.parametrize("values", [np.geomspace(1, 1e-3, 128), [1, *127 * [3e-3]], np.ones(128)])
def test_the_rounding_of_tf32_does_little(values, monkeypatch):
    """With one Gram matrix for all five steps, singular values of 4.5 were seen."""
    random = np.random.default_rng(0)
    left, _, right = np.linalg.svd(random.normal(size=(128, 512)), full_matrices=False)
    matrix = left * values @ right
    product = tf.matmul
    monkeypatch.setattr(tf, "matmul", lambda a, b, **options: product(in_tf32(a), in_tf32(b), **options))
    found, expected = orthogonalized(tf.constant(matrix, tf.float32)).numpy(), newton_schulz(matrix)
    assert 1e-5 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.025


def test_a_zero_gradient_leaves_the_weights_and_one_that_is_not_finite_shows():
    variables = [tf.Variable(tf.ones(shape), name=name) for name, shape in (
        ("a/kernel", (4, 6)), ("b/kernel", (4, 6)), ("c/kernel", (4, 6)), ("c/bias", (6,)))]
    bad = np.zeros((4, 6), np.float32)
    bad[1, 2] = np.inf
    updated(Muon(0.0), variables, [[*np.float32([np.zeros((4, 6)), np.ones((4, 6)), bad]), np.zeros(6, np.float32)]])
    same, changed, infinite, bias = (v.numpy() for v in variables)
    assert (same == 1).all() and (bias == 1).all()
    assert np.isfinite(changed).all() and (changed < 1).all() and np.isnan(infinite).all()


@pytest.mark.parametrize("workers", [2, 3, 40])
def test_shares_of_several_workers_make_the_bits_of_one(workers, monkeypatch):
    """Each worker's share is computed here in turn; a tensor that no worker had would stay zero."""
    random = np.random.default_rng(workers)
    monkeypatch.setattr("optim.muon.STACK", 2 * operations(16, 72))
    shapes = 3 * [(3, 3, 8, 16)] + 2 * [(24, 16)] + 2 * [(16, 4)] + [(5,)]
    names = [f"layer_{number}/{'kernel' if len(shape) > 1 else 'bias'}" for number, shape in enumerate(shapes)]
    starts, gradient = ([random.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(2))
    parts = []  # of each worker: its matrices, and zeros

    def weights(share=None):
        variables = [tf.Variable(start, name=name) for start, name in zip(starts, names, strict=True)]
        optimizer = Muon(rate_at(0), MOMENTUM, DECAY)
        optimizer.share = share
        optimizer.build(variables)
        optimizer.apply_gradients(zip(map(tf.constant, gradient), variables, strict=True))
        return [variable.numpy() for variable in variables]

    for worker in range(workers):
        weights(Share(worker, workers, lambda tensors: parts.append(tensors) or tensors))
    owned = [sum(bool(tf.reduce_any(x != 0)) for x in copies) for copies in zip(*parts, strict=True)]
    assert len(parts) == workers and owned == [1] * 4  # the first three make two
    shared = weights(Share(0, workers, lambda _: [tf.add_n(copies) for copies in zip(*parts, strict=True)]))
    for one, other in zip(weights(), shared, strict=True):
        np.testing.assert_array_equal(one, other)


def test_matrices_are_dealt_evenly_and_in_stacks():
    """By hand: 512 x 4608 takes 8 * 512^2 * 4608 + 28 * 512^3 = 13.4e9, so ResNet-50's three are three stacks."""
    assert operations(512, 4608) == 13_421_772_800 > STACK / 2
    assert [len(stack) for stack in in_stacks([1, 2, 3], operations(512, 4608))] == [1, 1, 1]
    assert [len(stack) for stack in in_stacks([*range(11)], STACK // 4)] == [4, 4, 3]
    assert dealt([3, 9, 4, 4, 2], 2) == [1, 0, 1, 1, 0]  # 9 + 2 and 4 + 4 + 3
    assert dealt([5, 1], 3) == [0, 1]


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_a_saved_model_is_loaded_without_custom_objects_and_goes_on(suffix, tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Conv2D(4, 3, input_shape=(5, 5, 3)), tf.keras.layers.Flatten(),
                                 tf.keras.layers.Dense(2)])
    model.compile(Muon(0.1, 0.8, weight_decay=0.1, exclude=("bias",)), loss="mse")
    images, targets = np.random.default_rng(0).normal(size=(2, 4, 5, 5, 3))[0], np.ones((4, 2))
    model.fit(images, targets, verbose=0)
    model.save(tmp_path / f"model{suffix}")
    loaded = tf.keras.models.load_model(tmp_path / f"model{suffix}")
    assert type(loaded.optimizer) is Muon and loaded.optimizer.get_config() == model.optimizer.get_config()
    for one in (model, loaded):
        one.fit(images, targets, shuffle=False, verbose=0)
    ours, theirs = ([*one.optimizer.variables, *one.variables] for one in (model, loaded))
    assert len(loaded.optimizer.variables) == 1 + 2 + 2 * 2  # updates; a momentum of each kernel; two of each bias
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.xdist_group("networks")
def test_an_update_of_resnet50_launches_few_operations():
    """A GPU takes 3 to 7 microseconds to launch one; kernel by kernel, the steps alone would be 54 * 5 * 8.

    330 are products of matrices: three in each step for each of 22 stacks."""
    shapes = [v.shape for v in built("resnet50").trainable_variables]
    optimizer = Muon(1.0, weight_decay=0.1)
    variables = [tf.Variable(tf.zeros(shape), name="conv/kernel" if len(shape) > 1 else "norm/gamma")
                 for shape in shapes]
    optimizer.build(variables)
    update = tf.function(lambda *given: optimizer.apply_gradients(zip(given, variables, strict=True)), autograph=False)
    assert launched(update.get_concrete_function(*map(tf.TensorSpec, shapes)).graph) <= 2150
