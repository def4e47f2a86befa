"""LARS and SGD against float64 NumPy, written from the paper's formula."""
import re

import numpy as np
import pytest
import tensorflow as tf
from conftest import built
from conftest import run as run_program

import optim
from distributed.optimizer import build
from optim.adam import AdamW
from optim.lamb import LAMB
from optim.lars import LARS, SGD
from optim.stacks import Scaled, norms, stacked, stacks_of
from tests.rigs.launches import launched

SHAPES = {"conv/kernel": (3, 3, 4, 8), "dense/kernel": (16, 5), "dense/bias": (5,), "norm/gamma": (8,)}


def rate_at(step):
    return 5.0 * (1 - step / 60) ** 2


def reference(weights, gradients, momentum, weight_decay, trust=None, epsilon=0.0, exclude=(), nesterov=False,
              clip=False):
    """arXiv:1708.03888, section 3.2.3, steps 1 to 5, in float64; trust None is SGD."""
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    buffers = {name: np.zeros_like(value) for name, value in weights.items()}
    for step, gradient in enumerate(gradients):
        for name, w in weights.items():
            g, plain = gradient[name].astype(np.float64), name.endswith(tuple(exclude)) and bool(exclude)
            ratio, decay = 1.0, 0.0 if plain else weight_decay
            if trust is not None and not plain:
                w_norm, g_norm = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
                if w_norm > 0 and g_norm > 0:
                    ratio = trust * w_norm / (g_norm + decay * w_norm + epsilon)
            rate = min(rate_at(step), ratio) if clip and trust is not None and not plain else rate_at(step) * ratio
            new = rate * (g + decay * w)
            buffers[name] = momentum * buffers[name] + new
            weights[name] = w - (momentum * buffers[name] + new if nesterov else buffers[name])
    return weights


def start(seed):
    random = np.random.default_rng(seed)
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    gradients = [{name: (random.normal(size=shape) * 10.0 ** random.integers(-3, 2)).astype(np.float32)
                  for name, shape in SHAPES.items()} for _ in range(50)]
    return weights, gradients


def run(optimizer, weights, gradients, xla=False):
    variables = {name: tf.Variable(value, name=name) for name, value in weights.items()}
    optimizer.build(list(variables.values()))

    @tf.function(jit_compile=xla, autograph=False)
    def step(gradient, rate):
        optimizer.learning_rate.assign(tf.cast(rate, optimizer.learning_rate.dtype))
        optimizer.apply_gradients([(gradient[name], variables[name]) for name in variables])

    for number, gradient in enumerate(gradients):
        step({name: tf.constant(value) for name, value in gradient.items()}, tf.constant(rate_at(number)))
    return {name: variable.numpy() for name, variable in variables.items()}


@pytest.mark.parametrize(("floatx", "tolerance"), [("float64", 1e-6), ("float16", 0.05)])
def test_variables_and_rate_may_have_the_dtype_of_a_users_keras_json(floatx, tolerance):
    weights, gradients = start(3)
    tf.keras.backend.set_floatx(floatx)
    try:
        initial, *given = ({name: value.astype(floatx) for name, value in one.items()}
                           for one in (weights, *gradients[:10]))
        found = run(LARS(0.0, weight_decay=1e-4), initial, given)
    finally:
        tf.keras.backend.set_floatx("float32")
    for name, value in reference(weights, gradients[:10], 0.9, 1e-4, trust=0.001).items():
        assert found[name].dtype == floatx
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [
    {},
    {"weight_decay": 5e-4},
    {"weight_decay": 1e-4, "trust_coefficient": 0.01, "epsilon": 1e-6},
    {"weight_decay": 1e-4, "exclude": ("gamma", "bias")},
    {"weight_decay": 1e-4, "nesterov": True},
    {"weight_decay": 1e-3, "momentum": 0.0},
    {"weight_decay": 1e-3, "momentum": 0.01},
    {"weight_decay": 1e-4, "trust_coefficient": 0.05, "clip": True},
], ids=str)
def test_lars_follows_the_paper_over_50_steps(options):
    weights, gradients = start(seed=1)
    options = {"momentum": 0.9} | options
    ours = run(LARS(0.0, **options), weights, gradients)
    expected = reference(weights, gradients, options.pop("momentum"), options.pop("weight_decay", 0.0),
                         options.pop("trust_coefficient", 0.001), **options)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], expected[name], rtol=2e-4, atol=2e-5, err_msg=name)


def test_xla_makes_the_same_steps():
    weights, gradients = start(seed=4)
    options = {"weight_decay": 1e-4, "exclude": ("bias",)}
    plain = run(LARS(0.0, **options), weights, gradients)
    compiled = run(LARS(0.0, jit_compile=True, **options), weights, gradients, xla=True)
    for name in SHAPES:
        np.testing.assert_allclose(compiled[name], plain[name], rtol=2e-4, atol=2e-5)


def test_an_independent_formulation_agrees():
    """One step without momentum is a rotation towards the gradient by a step of known length.

    With g orthogonal to w and no decay, |w' - w| = rate * trust_coefficient * |w| exactly, whatever |g|.
    """
    w, g = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32), np.array([[0.0, 1e-3], [0.0, 0.0]], np.float32)
    for scale in (1e-3, 1.0, 1e6):
        variable = tf.Variable(w)
        LARS(2.0, momentum=0.0, trust_coefficient=0.01).apply_gradients([(tf.constant(g * scale), variable)])
        assert np.linalg.norm(variable.numpy() - w) == pytest.approx(2.0 * 0.01 * 5.0, rel=1e-5)


def test_a_checkpoint_holds_all_that_the_next_step_needs(tmp_path):
    weights, gradients = start(seed=5)

    def made():
        variables = [tf.Variable(value, name=name) for name, value in weights.items()]
        lars = LARS(3.0, weight_decay=1e-4)
        lars.build(variables)
        return variables, lars, tf.train.Checkpoint(variables=variables, optimizer=lars)

    def go(variables, lars, steps):
        for gradient in steps:
            lars.apply_gradients(zip(map(tf.constant, gradient.values()), variables, strict=True))

    variables, lars, checkpoint = made()
    go(variables, lars, gradients[:5])
    lars.momentum.assign(0.5)
    path = checkpoint.save(str(tmp_path / "lars"))
    go(variables, lars, gradients[5:8])
    again, other, restored = made()
    restored.restore(path).assert_consumed()
    assert int(other.iterations) == 5 and float(other.momentum) == 0.5
    go(again, other, gradients[5:8])
    for a, b in zip(variables, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_has_its_weight_decay_inside_the_momentum(nesterov):
    weights, gradients = start(seed=2)
    gradients = [{name: value * 0.01 for name, value in gradient.items()} for gradient in gradients]
    ours = run(SGD(0.0, momentum=0.9, weight_decay=1e-3, nesterov=nesterov), weights, gradients)
    expected = reference(weights, gradients, 0.9, 1e-3, nesterov=nesterov)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], expected[name], rtol=2e-4, atol=2e-4, err_msg=name)


def test_the_ratio_is_one_where_a_norm_is_zero():
    lars = LARS(0.5, momentum=0.0, weight_decay=0.1)
    zeros, ones = tf.Variable([0.0, 0.0]), tf.Variable([1.0, 1.0])
    lars.apply_gradients([(tf.constant([3.0, 4.0]), zeros), (tf.constant([0.0, 0.0]), ones)])
    np.testing.assert_allclose(zeros.numpy(), [-1.5, -2.0])  # 0 - 0.5 * 1 * (g + 0)
    np.testing.assert_allclose(ones.numpy(), [0.95, 0.95])  # 1 - 0.5 * 1 * (0 + 0.1 * 1)


def test_the_learning_rate_is_inside_the_momentum_buffer():
    """A rate that falls to zero leaves the buffer moving: w = 1 - ratio * g, then minus 0.9 of the same."""
    lars, weight = LARS(1.0, momentum=0.9, trust_coefficient=0.1), tf.Variable([1.0])
    lars.apply_gradients([(tf.constant([2.0]), weight)])  # ratio 0.1 * 1 / 2, step 0.1
    lars.learning_rate.assign(0.0)
    lars.apply_gradients([(tf.constant([2.0]), weight)])
    np.testing.assert_allclose(weight.numpy(), [1 - 0.1 - 0.09], rtol=1e-6)


@pytest.mark.parametrize("kind", [LARS, SGD, LAMB, AdamW])
def test_exclusions_of_which_none_matches_are_an_error(kind):
    build(kind(1.0, exclude=("bias", "beta")), [tf.Variable([1.0], name="dense/bias")])  # a list made for batch norm
    with pytest.raises(ValueError, match="'gamma', 'beta'"):
        build(kind(1.0, exclude=("gamma", "beta")), [tf.Variable([1.0], name="dense/bias")])
    for part in ("as", "s", "dense", "b.*", "."):  # part of a word is not a suffix, nor is an expression
        with pytest.raises(ValueError, match=f"suffix in exclude: '{re.escape(part)}'"):
            build(kind(1.0, exclude=(part,)), [tf.Variable([1.0], name="dense/bias")])


def test_lamb_neither_decays_nor_adapts_what_is_excluded():
    """Against its authors' first step without bias correction: Adam's sign of the gradient, decayed and scaled."""
    weights, gradient = np.array([3.0, -4.0]), np.array([1e-3, 1e-3])
    variables = [tf.Variable(weights, dtype=tf.float32, name=name) for name in ("gammas/kernel", "norm/gamma")]
    optimizer = LAMB(0.1, exclude=("gamma",), weight_decay=0.5, epsilon=1e-12)
    copy = LAMB.from_config(optimizer.get_config())  # as Horovod does
    copy.apply_gradients([(tf.constant(gradient, tf.float32), variable) for variable in variables])
    decayed = np.sign(gradient) + 0.5 * weights
    ratio = np.linalg.norm(weights) / np.linalg.norm(decayed)
    np.testing.assert_allclose(variables[0], weights - 0.1 * ratio * decayed, rtol=1e-5)
    np.testing.assert_allclose(variables[1], weights - 0.1 * np.sign(gradient), rtol=1e-5)


@pytest.mark.parametrize(("decay", "exclude"), [(0.0, ()), (0.1, ()), (0.1, ("gamma", "bias"))])
def test_adamw_against_its_paper(decay, exclude):
    """arXiv:1711.05101, algorithm 2, in float64; epsilon as in arXiv:1412.6980, at the end of section 2."""
    weights, gradients = start(seed=6)
    optimizer = AdamW(0.0, weight_decay=decay, exclude=exclude)
    ours = run(AdamW.from_config(optimizer.get_config()), weights, gradients)  # as Horovod copies it
    for name, w in weights.items():
        w, m, v = w.astype(np.float64), 0.0, 0.0
        for step, gradient in enumerate(gradients, 1):
            g, rate = gradient[name].astype(np.float64), rate_at(step - 1)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            w = w - rate * decay * (0.0 if name.endswith(tuple(exclude)) and exclude else 1.0) * w
            w = w - rate * np.sqrt(1 - 0.999 ** step) / (1 - 0.9 ** step) * m / (np.sqrt(v) + 1e-7)
        np.testing.assert_allclose(ours[name], w, rtol=2e-3, atol=2e-3 * np.abs(w).max(), err_msg=name)


@pytest.mark.parametrize(("decay", "kernels"), [(0.0, 1), (0.1, 4)])
def test_adamw_launches_few_kernels_for_each_variable(decay, kernels):
    """Keras's own launches 21. With decay, there are two products and a subtraction."""
    def launches(count):
        variables = [tf.Variable([1.0]) for _ in range(count)]
        optimizer = AdamW(tf.Variable(0.1), weight_decay=decay)
        optimizer.build(variables)
        update = tf.function(lambda: optimizer.apply_gradients([(tf.constant([1.0]), v) for v in variables]))
        return launched(update.get_concrete_function().graph)

    assert launches(7) - launches(2) == 5 * kernels


@pytest.mark.parametrize("kind", [LARS, SGD, AdamW])
def test_with_a_gpu_keras_compiles_no_update(kind, monkeypatch):
    """By default Keras then compiles a program for each variable. LAMB of tensorflow-addons has no such option."""
    monkeypatch.setattr("keras.src.optimizers.optimizer.tf.config.list_physical_devices", lambda *_: ["a GPU"])
    assert tf.keras.optimizers.Adam().jit_compile
    assert not kind.from_config(kind(0.1).get_config()).jit_compile  # as Horovod copies it


def test_sgd_decays_what_is_not_excluded():
    weights, gradients = start(seed=4)
    ours = run(SGD(0.0, momentum=0.9, weight_decay=1e-2, exclude=("gamma", "bias")), weights, gradients)
    expected = reference(weights, gradients, 0.9, 1e-2, exclude=("gamma", "bias"))
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], expected[name], rtol=2e-4, atol=2e-5, err_msg=name)


def test_config_rebuilds_the_optimizer():
    lars = LARS(2.0, 0.8, weight_decay=1e-4, trust_coefficient=0.02, epsilon=1e-7, exclude=("bias",), nesterov=True)
    copy = LARS.from_config(lars.get_config())
    assert copy.get_config() == lars.get_config()
    weights, gradients = start(seed=3)
    ours, theirs = run(lars, weights, gradients), run(copy, weights, gradients)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_every_optimizer_of_the_registry_lowers_a_loss(name):
    rate = {"lars": 30.0, "sgd": 0.05, "lamb": 0.05, "muon": 0.2, "adam": 0.2, "adamw": 0.2}[name]
    optimizer = optim.create_optimizer(name, learning_rate=rate, momentum=0.9, weight_decay=1e-4,
                                       trust_coefficient=0.001, epsilon=0.0, exclude=())
    variable = tf.Variable([3.0, -2.0], name="kernel")
    losses = []
    for _ in range(60):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(variable - [1.0, 1.0]))
        losses.append(float(loss))
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    assert min(losses[-5:]) < 0.1 * losses[0]


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("make", [SGD, LARS])
@pytest.mark.parametrize("nesterov", [False, True])
def test_scaled_gradients_are_those_multiplied_before(make, nesterov, with_norms):
    random, shapes = np.random.default_rng(5), [(3, 5), (5, 3), (70, 1000), (600, 500), (4,)]
    initial = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    factors = np.array([0.125, 1 / 24, 3e-4, 7.0, 0.2], np.float32)
    ways = [], []
    for variables in ways:
        variables += [tf.Variable(one, name="bias" if one.ndim == 1 else f"kernel_{number}")
                      for number, one in enumerate(initial)]
    plain, lazy = (make(0.5, weight_decay=0.01, exclude=("bias",), nesterov=nesterov) for _ in ways)
    for _ in range(3):
        tensors = [random.normal(size=shape).astype(np.float32) for shape in shapes]
        multiplied = [one * factor for one, factor in zip(tensors, factors, strict=True)]
        norms = [np.float32(np.linalg.norm(one)) if with_norms else None for one in multiplied]
        plain.apply_gradients(zip(map(tf.constant, multiplied), ways[0], strict=True))
        lazy.apply_gradients(zip(map(Scaled, map(tf.constant, tensors), factors, norms), ways[1], strict=True))
    for one, other, start in zip(*ways, initial, strict=True):
        moved = one.numpy() - start
        np.testing.assert_allclose(other.numpy() - start, moved, atol=2e-5 * np.abs(moved).max() + 5e-7)


@pytest.mark.xdist_group("networks")
@pytest.mark.parametrize("options", [{}, {"exclude": ("gamma",)}, {"weight_decay": 0.0}, {"nesterov": True}], ids=str)
def test_an_update_of_resnet50_launches_few_operations(options):
    """A GPU takes 3 to 7 microseconds to launch one; variable by variable there were 3,700."""
    shapes = [v.shape for v in built("resnet50").trainable_variables]
    assert len(shapes) == 161
    optimizer = LARS(1.0, **{"weight_decay": 1e-4} | options)
    variables = [tf.Variable(tf.zeros(shape), name="conv/kernel" if len(shape) > 1 else "norm/gamma")
                 for shape in shapes]
    optimizer.build(variables)

    @tf.function(autograph=False)
    def update(*gradients):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    assert launched(update.get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes)).graph) <= 400


@pytest.mark.parametrize("elements", [1, 65536, 65537, 262144, 262145, 300001])
@pytest.mark.parametrize("count", [1, 3])
def test_norms_against_float64(elements, count):
    """At the sizes where tensors are stacked, left alone, or padded."""
    random = np.random.default_rng(elements)
    tensors = [random.normal(size=elements).astype(np.float32) * 10.0 ** number for number in range(count)]
    tensors.insert(1, random.normal(size=(3, 5)).astype(np.float32))
    stacks = stacks_of([tf.constant(one) for one in tensors])
    for jit_compile in (False, True):
        found = norms(stacks, stacked(stacks, [*map(tf.constant, tensors)]), jit_compile).numpy()
        order = [position for stack in stacks for position in stack.positions]
        assert sorted(order) == list(range(len(tensors)))
        for norm, position in zip(found, order, strict=True):
            assert norm == pytest.approx(np.linalg.norm(tensors[position].astype(np.float64)), rel=1e-6)


def test_large_and_equal_variables_follow_the_paper_too():
    """Stacked, alone, through the buffer, and excluded, in one update."""
    shapes = {"a/kernel": (300, 400), "b/kernel": (300, 400), "c/kernel": (600, 500), "d/kernel": (70, 1000),
              "e/bias": (400,), "f/bias": (400,)}
    random = np.random.default_rng(9)
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    gradients = [{name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
                 for _ in range(5)]
    for exclude in ((), ("bias",)):
        ours = run(LARS(0.0, weight_decay=0.1, exclude=exclude), weights, gradients)
        expected = reference(weights, gradients, 0.9, 0.1, 0.001, exclude=exclude)
        for name in shapes:
            np.testing.assert_allclose(ours[name], expected[name], rtol=2e-4, atol=2e-5, err_msg=name)


def test_xla_without_its_norms_names_the_argument():
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(3,))])
    model.compile(LARS(0.1), loss="mse", jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="XLA_needs_LARS_with_jit_compile_True"):
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_a_saved_model_is_loaded_without_custom_objects(suffix, tmp_path):
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(3,))])
    model.compile(LARS(0.1, trust_coefficient=0.02, exclude=("bias",)), loss="mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    model.save(tmp_path / f"model{suffix}")
    loaded = tf.keras.models.load_model(tmp_path / f"model{suffix}")
    assert type(loaded.optimizer) is LARS and loaded.optimizer.get_config() == model.optimizer.get_config()
    for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_needs_nothing_but_tensorflow():
    """As `pip install --no-deps` leaves it."""
    program = """
import sys
import tensorflow
before = {name.partition(".")[0] for name in sys.modules}
import optim.lars
print(*sorted({name.partition(".")[0] for name in sys.modules} - before))
"""
    done = run_program("python", 1, "-c", program)
    assert done.stdout.split() == ["optim"], done.stdout + done.stderr
