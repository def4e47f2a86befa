"""Mixed precision: updates stay in float32, and an overflow on one of the workers skips the step on all."""
import json

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from conftest import run

import model_zoo
from distributed.exchange import GradientExchange
from distributed.optimizer import build, has_dynamic_scale, inner, wrap
from optim.lars import LARS
from training.divergence import divergence_reason
from training.state import Totals
from training.step import StepInput, StepParts, StepResult, make_train_step

OVERFLOW = """
import json, sys, numpy as np, tensorflow as tf, horovod.tensorflow as hvd, model_zoo
from distributed.exchange import GradientExchange
from distributed.float16 import initial_scales
from distributed.optimizer import build, wrap
from distributed.torus import ProcessSets
from distributed.world import World
from optim.lars import LARS
from training.state import Totals
from training.step import StepInput, StepParts, make_train_step

exchange = GradientExchange(ProcessSets(2, 2) if sys.argv[1] == "torus" else None, sys.argv[2])
hvd.init(process_sets=exchange.process_sets or None)
tf.keras.mixed_precision.set_global_policy("mixed_float16")
model = model_zoo.create_model("convnet", 4, 8, seed=1)
optimizer = wrap(LARS(0.0, weight_decay=1e-4), loss_scaling=True)
build(optimizer, model.trainable_variables)
exchange.scales = initial_scales(len(model.trainable_variables))
random = np.random.default_rng(hvd.rank())
images, labels = random.normal(size=(80, 8, 8, 3)).astype(np.float32), random.integers(0, 4, size=(80, 1))
if hvd.rank() == 1:
    images[40] = 1e30  # in the second of two micro-batches of the third update
step, seen = make_train_step(StepParts(model, optimizer, exchange, Totals(), range(2))), []
batches = iter(tf.data.Dataset.from_tensor_slices((images, labels)).batch(8))
for _ in range(5):
    step(batches, StepInput.of(1.0, 0.9))
    weights = np.concatenate([v.numpy().ravel() for v in model.trainable_variables]).astype(np.float64)
    seen.append([float(optimizer.loss_scale), float(weights.sum()), bool(np.isfinite(weights).all())])
everyone = hvd.allgather_object(seen)
print(json.dumps(everyone) if hvd.rank() == 0 else "", end="")
"""


@pytest.mark.trainings
@pytest.mark.parametrize(("workers", "allreduce", "compression"), [
    (2, "ring", "none"), (2, "ring", "fp16"), (4, "torus", "none"), (4, "torus", "fp16")])
def test_an_overflow_on_one_worker_skips_the_step_on_all(workers, allreduce, compression):
    done = run("mpirun" if workers == 2 else "horovodrun", workers, "-c", OVERFLOW, allreduce, compression)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, *others = json.loads(done.stdout.removeprefix("[0]<stdout>:"))
    assert others == [ours] * (workers - 1)  # scales and weights
    scales, sums, finite = zip(*ours, strict=True)
    assert scales[0] == scales[1] == 2 * scales[2] and scales[2] == scales[3] == scales[4]
    assert sums[0] != sums[1] == sums[2] != sums[3] != sums[4] and all(finite)


def test_a_fixed_loss_scale_trains_the_same_and_never_waits():
    hvd.init()
    images, labels = np.random.default_rng(0).normal(size=(32, 8, 8, 3)), np.zeros((32, 1), np.int64)
    trained, conditions = [], []
    for fixed in (None, 1024.0):
        model = model_zoo.create_model("convnet", 4, 8, seed=1)
        optimizer = wrap(LARS(0.0, weight_decay=1e-4), loss_scaling=True, loss_scale=fixed)
        build(optimizer, model.trainable_variables)
        assert has_dynamic_scale(optimizer) == (fixed is None)
        batches = iter(tf.data.Dataset.from_tensor_slices((images, labels)).batch(16).repeat())
        step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(), range(2)))
        for _ in range(3):
            step(batches, StepInput.of(1.0, 0.9))
        trained.append([variable.numpy() for variable in model.trainable_variables])
        graph = step.get_concrete_function(batches, StepInput.of(1.0, 0.9)).graph
        conditions.append(sum("If" in one.type for one in graph.get_operations()))
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert conditions[1] < conditions[0]
    model.trainable_variables[-2].assign(np.full_like(trained[1][-2], np.inf))
    result = StepResult.unpacked(step(batches, StepInput.of(1.0, 0.9)).numpy(),
                                 StepResult.shapes(len(model.trainable_variables)))
    assert divergence_reason(result.loss, result.norms, ["a"] * 10, 4, has_dynamic_scale(optimizer))


@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_weights_momentum_and_norms_are_float32(precision):
    hvd.init()
    tf.keras.mixed_precision.set_global_policy(precision)
    try:
        model = model_zoo.create_model("convnet", 4, 8, seed=1)
        optimizer = wrap(LARS(0.0, weight_decay=1e-4), loss_scaling=precision == "mixed_float16")
        build(optimizer, model.trainable_variables)
        images, labels = np.random.default_rng(0).normal(size=(32, 8, 8, 3)), np.zeros((32, 1), np.int64)
        batches = iter(tf.data.Dataset.from_tensor_slices((images, labels)).batch(16).repeat())
        step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(), range(2)))
        for _ in range(3):
            step(batches, StepInput.of(1.0, 0.9))
        assert model.layers[2].compute_dtype != "float32"  # the network, behind its normalisation, is in half precision
        variables = [*model.trainable_variables, *inner(optimizer).variables]
        assert all(v.dtype == tf.float32 for v in variables if v.dtype.is_floating)
        assert len(variables) > 2 * len(model.trainable_variables)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
