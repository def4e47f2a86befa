"""Batch norm over a span of samples, whatever a worker holds: against Keras's own on micro-batches of the span."""
import json
import os

import numpy as np
import pytest
from conftest import ROOT, rows, run, weights

from common.errors import UserError
from plan import flags
from tests.rigs.bn_train import PROGRAM
from tests.rigs.plans import plan

SHORT = ("--model=bn_convnet", "--image_size=16", "--batch_size=128", "--epochs=0.3", "--optimizer=sgd",
         "--warmup=none", "--learning_rate=0.02", "--augmentation=none", "--deterministic=same_workers")


@pytest.fixture(scope="module")
def trained(train_once):
    """A function of (workers, flags) that gives the folder of a training, made once."""
    return lambda workers, *flags: train_once(*SHORT, *flags, kind="python" if workers == 1 else "mpirun",
                                              workers=workers, program=PROGRAM)


@pytest.mark.trainings
@pytest.mark.parametrize(("workers", "micro", "span"), [
    (1, 64, 16),  # a micro-batch is cut
    (2, 16, 32),  # two workers share
])
def test_the_span_is_that_of_one_workers_micro_batches(trained, workers, micro, span):
    """All variables, moving statistics included, but for the order of sums."""
    ours = trained(workers, f"--micro_batch_size={micro}", f"--batch_norm_span={span}")
    theirs = trained(1, f"--micro_batch_size={span}", "--batch_norm_span=auto")
    [phase] = json.loads((ours / "plan.json").read_text())["phases"]
    assert phase["batch_norm_span"] == span
    ours_weights, theirs_weights = weights(ours), weights(theirs)
    for name in theirs_weights:
        if name.startswith("model/"):
            np.testing.assert_allclose(ours_weights[name], theirs_weights[name], rtol=2e-2, atol=2e-4, err_msg=name)
    assert rows(ours)[-1]["train_loss"] == pytest.approx(rows(theirs)[-1]["train_loss"], rel=1e-4)
    other = weights(trained(1, "--micro_batch_size=128", "--batch_norm_span=auto"))  # the span makes a difference
    kernel = next(name for name in other if name.startswith("model/") and name.endswith("kernel"))
    ours_off, other_off = (np.abs(one[kernel] - theirs_weights[kernel]).max() for one in (ours_weights, other))
    assert other_off > 10 * ours_off


@pytest.fixture
def one_core():
    """A core for each worker: TensorFlow adds up in an order that depends on the number of threads."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.trainings
def test_moving_statistics_do_not_depend_on_the_workers(trained, one_core):
    """After three steps, whose sums are rounded in another order. Two pairs of four workers share."""
    alone = weights(trained(1, "--micro_batch_size=32", "--batch_norm_span=32"))
    assert int(next(value for name, value in alone.items() if "iteration" in name)) == 3
    found = weights(trained(4, "--micro_batch_size=16", "--batch_norm_span=32"))
    for name in alone:
        if "moving" in name:
            np.testing.assert_allclose(found[name], alone[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.trainings
def test_a_span_that_grows_with_exact_statistics(trained):
    """Each of two workers cuts its micro-batches, then both share."""
    flags_ = ("--batch_norm_span=0:8,0.2:32", "--epochs=0.4", "--batch_norm_statistics=exact")
    single, shared = trained(1, *flags_), trained(2, *flags_, "--micro_batch_size=16")
    made = json.loads((shared / "plan.json").read_text())
    assert [(phase["start_epoch"], phase["batch_norm_span"]) for phase in made["phases"]] == [(0, 8), (0.2, 32)]
    for one, other in zip(rows(single), rows(shared), strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=2e-3)
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=2e-2)


@pytest.mark.parametrize(("workers", "micro", "span", "expected"), [
    (1, None, None, (64, 64, 1)), (1, None, 16, (64, 16, 1)), (1, None, 128, (128, 128, 1)),
    (8, None, 16, (16, 16, 1)), (16, None, 32, (8, 32, 4)), (32, None, 32, (4, 32, 8)), (4, 8, 32, (8, 32, 4)),
    (4, 32, 8, (32, 8, 1))])
def test_every_launch_honours_the_span(workers, micro, span, expected):
    phase, = plan(workers, batch_size="128", micro_batch_size=micro, batch_norm_span=span and str(span)).phases
    assert (phase.micro_batch_size, phase.batch_norm_span, phase.neighbours) == expected
    assert phase.accumulation_steps * phase.micro_batch_size * workers == 128


@pytest.mark.parametrize(("workers", "micro", "span", "nearest"), [
    (1, None, 48, "32 and 64"), (2, 64, 48, "32 and 64"), (3, None, 2, "1 and 3"), (2, 16, 64, "32")])
def test_a_span_that_cannot_be_is_an_error_with_the_nearest(workers, micro, span, nearest):
    with pytest.raises(UserError, match=f"nearest possible spans: {nearest}"):
        plan(workers, batch_size="129" if workers == 3 else "128", micro_batch_size=micro, batch_norm_span=str(span))


@pytest.mark.parametrize("flag", ["--xla"])
def test_several_workers_share_no_span_under_xla(flag):
    done = run("python", 1, ROOT / "train.py", "--dry_run", "--workers=4", "--batch_norm_span=64", flag)
    assert done.returncode == 1 and "its groups would span several workers, which --xla does not support" in done.stderr
    done = run("python", 1, ROOT / "train.py", "--dry_run", "--workers=4", "--batch_norm_span=32", flag)
    assert done.returncode == 0


def test_by_default_the_span_is_the_micro_batch():
    assert flags.parse(["train.py", "--batch_norm_span=auto"]).recipe.batch_norm_span is None
    assert [phase.batch_norm_span for phase in plan(2, batch_size="128").phases] == [64]
