"""The gradient noise scale, against known covariances and gradients of single micro-batches in float64."""
import shutil

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from conftest import DIGITS, TINY, rows, run, train

import model_zoo
from distributed.exchange import GradientExchange
from distributed.optimizer import build, wrap
from optim.lars import SGD
from reporting import sections
from training.noise_scale import NoiseScale
from training.state import Totals
from training.step import StepInput, StepParts, StepResult, make_train_step

BATCH, MICRO = 256, 32


def estimates(gradient, deviation, updates, outlier=1.0):
    """A NoiseScale of two variables whose samples' gradients are normal with this mean and deviation."""
    random, scale = np.random.default_rng(0), NoiseScale(2)
    for update in range(updates):
        mean = np.asarray(gradient) * (outlier if update == 0 else 1.0)
        micro = mean + deviation / MICRO ** 0.5 * random.normal(size=(BATCH // MICRO, len(mean)))
        halves = [micro[:, :100], micro[:, 100:]]
        scale.add(BATCH, MICRO, np.array([np.linalg.norm(half.mean(axis=0)) for half in halves]),
                  np.array([np.square(half).sum(axis=1).mean() for half in halves]))
    return scale


@pytest.mark.parametrize("deviation", [0.2, 1.0, 3.0])
def test_a_known_covariance_within_ten_percent(deviation):
    gradient = np.random.default_rng(3).normal(size=1000) * 0.05
    scale = estimates(gradient, deviation, 400, outlier=50.0)
    found = scale.collect(["a", "b"], [1, 1])
    assert found["noise_scale"] == pytest.approx(1000 * deviation ** 2 / np.square(gradient).sum(), rel=0.1)
    assert found["layers"]["b"] == pytest.approx(900 * deviation ** 2 / np.square(gradient[100:]).sum(), rel=0.1)
    assert found["updates"] == 400 and scale.collect(["a", "b"], [1, 1]) == {}


def test_noise_alone_is_uncertain_and_measured_for_longer():
    scale = estimates(np.zeros(1000), 1.0, 64)
    found = scale.collect(["a", "b"], [1, 1])
    assert found["noise_scale"] is None and found["variance"] == pytest.approx(1000, rel=0.05)
    assert scale.collect(["a", "b"], [1, 1])["updates"] == 64
    scale.add(BATCH, MICRO, np.array([np.inf, 1.0]), np.array([1.0, np.nan]))  # an overflow
    assert scale.collect(["a", "b"], [1, 1])["updates"] == 64


def test_ratios_multiply_the_gradients():
    gradient = np.full(1000, 0.05)
    only_a = estimates(gradient, 1.0, 200).collect(["a", "b"], [3.0, 0.0])
    assert only_a["noise_scale"] == pytest.approx(1 / 0.05 ** 2, rel=0.2)
    assert only_a["variance"] == pytest.approx(9 * 100, rel=0.1)


@pytest.mark.parametrize("updates", [1, 5, 64, 65, 1000])
def test_sums_of_a_fixed_size_are_all_that_is_kept(updates):
    """Each update counts once, and the runs are nearly as long as each other."""
    whole, halves = estimates(np.zeros(1000), 1.0, updates), NoiseScale(2)
    means = np.array([whole.collect(["a", "b"], [1, 0])["variance"], whole.collect(["a", "b"], [0, 1])["variance"]])
    whole.write()
    halves.variable.assign(whole.variable)
    halves.read()
    for scale in (whole, halves):
        scale.add(BATCH, MICRO, np.array([0.1, 0.2]), np.array([3.0, 4.0]))
    sums = halves.variable.numpy()
    assert sums.shape == (64, 2, 3) and sums[:, 0, 2].sum() == updates
    filled = sums[sums[:, 0, 2] > 0, 0, 2]
    assert len(filled) >= min(updates, 32) and (filled[:-1] == filled[0]).all() and filled[-1] <= filled[0]
    assert halves.collect(["a", "b"], [1, 1]) == whole.collect(["a", "b"], [1, 1])
    assert means == pytest.approx([100, 900], rel=0.7)


@pytest.mark.trainings
def test_a_resumed_run_knows_the_estimates_before_the_stop(tmp_path):
    """It goes on from a checkpoint between two evaluations, and from one after an uncertain estimate."""
    flags = (*TINY, "--epochs=3", "--batch_size=128", "--micro_batch_size=32", "--log_noise_scale", "--deterministic",
             "--learning_rate=0", "--checkpoint_every=0.45")
    whole, half = tmp_path / "whole", tmp_path / "half"
    train(*flags, f"--output_dir={whole}")
    [*_, kept, last] = sorted((whole / "checkpoints").glob("step-*"))
    shutil.copytree(whole, half, symlinks=True)
    shutil.rmtree(half / "checkpoints" / last.name)
    (half / "checkpoints" / "best").unlink()
    done = train(*flags, f"--output_dir={half}")
    assert f"resumed after step {int(kept.name.split('-')[1])} of 33" in done.stderr
    assert (half / "noise_scale.jsonl").read_text() == (whole / "noise_scale.jsonl").read_text()
    assert [row["updates"] for row in rows(half, "noise_scale.jsonl")] == [12, 23, 10]  # the first one is uncertain


@pytest.mark.parametrize("loss_scaling", [False, True])
def test_a_step_measures_the_norms_of_its_micro_batches(loss_scaling):
    hvd.init()
    random = np.random.default_rng(0)
    images = random.normal(size=(32, 8, 8, 3)).astype(np.float32)
    labels = random.integers(0, 4, size=(32, 1))
    model = model_zoo.create_model("convnet", 4, 8, seed=1)
    gradients = []
    for first in range(0, 32, 8):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels[first:first + 8, 0],
                                                                   model(images[first:first + 8]))
            loss = tf.reduce_mean(losses)
        gradients.append([one.numpy().astype(np.float64) for one in tape.gradient(loss, model.trainable_variables)])
    optimizer = wrap(SGD(0.0), loss_scaling)
    build(optimizer, model.trainable_variables)
    step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(), range(4), measures_noise=True))
    batches = iter(tf.data.Dataset.from_tensor_slices((images, labels)).batch(8))
    shapes = StepResult.shapes(len(model.trainable_variables), measures_noise=True)
    found = StepResult.unpacked(step(batches, StepInput.of(0.0, 0.9)).numpy(), shapes)
    squares = np.array([[np.square(one).sum() for one in micro] for micro in gradients]).mean(axis=0)
    np.testing.assert_allclose(found.squares, squares, rtol=1e-3)
    norms = [np.linalg.norm(np.mean(one, axis=0)) for one in zip(*gradients, strict=True)]
    np.testing.assert_allclose(found.norms, norms, rtol=1e-3)


@pytest.mark.trainings
def test_the_report_says_what_a_batch_size_is_worth(tmp_path):
    flags = (DIGITS, "--model=convnet", "--optimizer=sgd", "--learning_rate=0.002", "--warmup=none", "--epochs=3",
             "--batch_size=64", "--micro_batch_size=16", "--log_noise_scale")
    for workers in (1, 2):
        train(*flags, f"--output_dir={tmp_path / str(workers)}", kind="mpirun", workers=workers)
    alone, two = (rows(tmp_path / str(workers), "noise_scale.jsonl") for workers in (1, 2))
    assert [row["epoch"] for row in alone] == [1, 2, 3] and alone[0]["updates"] == 23
    assert alone[0]["noise_scale"] > 0
    for name in ("gradient_squared", "variance"):
        assert two[0][name] == pytest.approx(alone[0][name], rel=0.02)
    assert "the gradient noise is about" in (tmp_path / "1" / "report.html").read_text()


def test_one_micro_batch_has_nothing_to_compare():
    done = run("python", 1, "train.py", DIGITS, "--batch_size=64", "--micro_batch_size=64", "--log_noise_scale",
               "--dry_run")
    assert done.returncode == 1 and "--log_noise_scale: a batch of a single micro-batch" in done.stderr


def test_the_schedule_doubles_when_the_noise_does():
    measured = [{"epoch": epoch, "noise_scale": noise} for epoch, noise in
                ((1, 18.0), (2, 109.0), (4, 100.0), (6, 850.0), (8, 400.0), (9, 3350.0))]
    assert sections.growing_batch_size(measured) == "0:16,1:64,4:512,8:2048"
    assert sections.growing_batch_size(measured[:1]) == "16"
    assert sections.two_digits(2143.0) == "2,100"
    unknown = [{"epoch": 1, "noise_scale": None, "updates": 66}]
    assert "66 updates, the gradient drowns in the noise" in sections.noise_in_words(unknown, [])
