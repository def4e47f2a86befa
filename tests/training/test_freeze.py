"""--freeze: only the last layer is trained, on what the others compute in an evaluation."""
from types import SimpleNamespace

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from conftest import DIGITS, ROOT, rows, run, start, train, weights

import model_zoo
import optim
from distributed.exchange import GradientExchange
from distributed.optimizer import build, wrap
from model_zoo.cost import counted
from model_zoo.layers import last_layer, trained_variables
from plan import flags
from tests.rigs.bn_train import PROGRAM
from tests.rigs.trainings import differences
from tests.training.test_resume import newest_step, stopped
from training.monitoring import forecast
from training.state import Totals
from training.step import StepInput, StepParts, make_train_step

BASE = (DIGITS, "--deterministic", "--batch_size=96", "--micro_batch_size=8", "--batch_norm_span=8", "--warmup=none",
        "--image_size=16", "--optimizer=sgd", "--learning_rate=0.1", "--checkpoint_every=0.3")


def test_the_forecast_of_the_time_is_that_of_forward_passes():
    """Of 600 million images, at 20 billion multiply-adds a second and core; an update is three passes otherwise."""
    model = model_zoo.create_model("resnet10_narrow", 10, 64)
    hours = 600e6 * counted(model).multiply_adds / (2 * 20e9) / 3600
    for words, passes in ([], 3), (["--freeze"], 1):
        setup = SimpleNamespace(
            settings=flags.parse(["train.py", *words]), plan=SimpleNamespace(samples=600_000_000, position=lambda _: 0),
            state=SimpleNamespace(model=model, progress=SimpleNamespace(step=0)),
            world=SimpleNamespace(size=2, cores=1, gpu=None))
        assert forecast(setup) == [f"forecast: about {round(passes * hours):,} h on 2 CPU cores"]


@pytest.mark.parametrize(("name", "last"), [
    ("resnet10_narrow", "dense"), ("convnet_bn", "dense"),
    pytest.param("keras:MobileNetV3Small", "Logits", marks=pytest.mark.trainings)])
def test_an_update_against_float64(name, last):
    """Plain SGD on the features of an evaluation, by hand: W - rate * features^T (softmax - one-hot) / samples.

    The networks have batch norm, whose statistics are others in training, stochastic depth, and dropout.
    """
    hvd.init()
    random = np.random.default_rng(0)
    size = 32
    images, labels = random.integers(0, 256, (8, size, size, 3)).astype(np.uint8), random.integers(0, 4, (8, 1))
    more = {"drop_path": 0.9} if name == "resnet10_narrow" else {}
    model = model_zoo.create_model(name, 4, size, seed=1, **more)
    layer = last_layer(model)
    assert layer.name.startswith(last)
    for variable in model.variables:  # gammas of 0 would hide the branches
        variable.assign(random.uniform(0.1, 1.0, variable.shape) if variable.name.endswith(("variance:0", "gamma:0"))
                        else variable + 0.1 * random.normal(size=variable.shape))
    before = {variable.ref(): variable.numpy() for variable in model.variables}
    evaluated = tf.keras.Model(model.input, [layer.get_input_at(-1), model.output])
    features, logits = evaluated(images.astype(np.float32), training=False)
    features, logits = (values.numpy().astype(np.float64).reshape(8, -1) for values in (features, logits))
    optimizer = wrap(optim.create_optimizer(
        "sgd", 0.0, momentum=0.0, weight_decay=0.0, trust_coefficient=0.0, epsilon=0.0, exclude=()))
    kernel, bias = trained_variables(model, True)
    build(optimizer, [kernel, bias])
    step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(), freeze=True))
    batches = iter(tf.data.Dataset.from_tensors((images, labels)))
    graph = step.get_concrete_function(batches, StepInput.of(0.5, 0.0)).graph.as_graph_def()
    step(batches, StepInput.of(0.5, 0.0))

    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    errors = (shares / shares.sum(axis=1, keepdims=True) - np.eye(4)[labels[:, 0]]) / 8
    moved = {kernel.ref(): features.T @ errors, bias.ref(): errors.sum(axis=0)}
    for variable in model.variables:
        if variable.ref() in moved:
            expected = before[variable.ref()] - 0.5 * moved[variable.ref()].reshape(variable.shape)
            np.testing.assert_allclose(variable, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
            assert np.abs(variable - before[variable.ref()]).max() > 1e-3
        else:
            np.testing.assert_array_equal(variable, before[variable.ref()])
    nodes = [node.op for function in graph.library.function for node in function.node_def]
    assert [op for op in nodes if "BackpropFilter" in op] == ["Conv2DBackpropFilter"] * (last == "Logits")
    assert "Conv2D" in nodes and not any("BatchNormGrad" in op for op in nodes)


@pytest.mark.trainings
@pytest.mark.parametrize("name", ["bn_convnet", "examples.own_network:network"])
def test_frozen_then_trained_whole(name, train_once, tmp_path):
    """Weights and statistics stay to the bit; two workers, stopped and resumed on one, make the bits of one."""
    model = (*BASE, f"--model={name}")
    before = train_once(*model, "--epochs=0.5", program=PROGRAM)
    frozen = (*model, "--epochs=2", "--freeze", f"--init_checkpoint={before}", "--ema_decay=0.5")
    train(*frozen, f"--output_dir={tmp_path}/1", program=PROGRAM)
    assert stopped(tmp_path / "2", 2, frozen, step=8) == 75
    assert 8 <= newest_step(tmp_path / "2") < 29
    assert start(tmp_path / "2", 1, frozen, PROGRAM).wait(300) == 0
    assert differences(tmp_path / "1", tmp_path / "2") == []
    old, new = weights(before), weights(tmp_path / "1")
    names = sorted(one for one in old if one.startswith(("model/", "input/")))
    last = [one for one in names if "dense" in one]
    assert len(last) == 2 and any("moving_variance" in one for one in names)
    assert [one for one in names if not np.array_equal(old[one], new[one])] == last
    assert rows(tmp_path / "1")[-1]["train_loss"] < rows(before)[-1]["val_loss"]
    said = train(*model, "--epochs=0.2", f"--init_checkpoint={tmp_path}/1", f"--output_dir={tmp_path}/whole",
                 program=PROGRAM).stderr
    count = sum(one.startswith("model/") for one in names)
    assert f"init_checkpoint: took {count} of {count} moving averages from {tmp_path}/1" in said
    whole = weights(tmp_path / "whole")
    assert all(not np.array_equal(new[one], whole[one]) for one in names if one.startswith("model/"))


def test_a_last_layer_without_trainable_weights_is_refused(tmp_path):
    (tmp_path / "still.py").write_text(
        "import tensorflow as tf\n"
        "def network(x, classes, batch_norm_momentum, seed):\n"
        "    x = tf.keras.layers.GlobalAveragePooling2D()(x)\n"
        "    return tf.keras.layers.Dense(classes, name='last', trainable=False)(x)\n")
    done = run("python", 1, ROOT / "train.py", DIGITS, "--model=still:network", "--freeze", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        "train.py: --freeze: the last layer with weights, last, has none that can be trained")
