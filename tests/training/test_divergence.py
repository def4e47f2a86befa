"""Divergence stops all workers at the same step, by name; rolling back passes over the data that did it."""
import contextlib
import dataclasses
import json
import math
from types import SimpleNamespace

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from conftest import DIGITS, ROOT, TINY, rows, run

from common.errors import UserError, plural
from common.run_folder import RunFolder
from data import synthetic
from data.mixing import Mixing
from data.staging.spool import Admitted
from plan import flags
from plan.plan import plan_for
from tests.rigs.bn_train import PROGRAM
from training import divergence
from training.checkpoints import Checkpoints
from training.losses import loss_of_guessing, make_loss
from training.observer import Observer
from training.stopping import StopRequest

NAMES = ["first/kernel", "second/kernel", "third/kernel"]


@pytest.mark.parametrize(("loss", "norms", "loss_scaling", "message"), [
    (2.3, [1, 2, 3], False, None),
    (2300.0, [1, 2, 3], False, None),  # 1,000 times log(10) is 2,303
    (2310.0, [1, 32, 3], False, "1000 times that of guessing; the largest gradient is that of second/kernel"),
    (math.nan, [1, 2, 3], False, "the loss is nan"),
    (math.inf, [1, 2, 3], True, "the loss is inf"),
    (2.3, [1, math.nan, math.inf], False, "the first gradient that is not finite is that of third/kernel"),
    (2.3, [math.inf, math.nan, 5], False, "the first gradient that is not finite is that of second/kernel"),
    (2.3, [math.inf, math.nan, 5], True, None),  # the loss scale sees to it
])
def test_what_is_wrong(loss, norms, loss_scaling, message):
    found = divergence.divergence_reason(loss, np.array(norms, np.float32), NAMES, math.log(10), loss_scaling)
    assert (message is None and found is None) or message in found


@pytest.mark.parametrize(("loss", "classes"), [("cross_entropy", 2), ("cross_entropy", 1000), (
    "binary_cross_entropy", 1000)])
def test_the_loss_of_guessing_is_that_of_logits_of_zero(loss, classes):
    found = make_loss(loss, 0.0)(tf.zeros([8, classes]), tf.range(8) % classes)
    assert found.numpy() == pytest.approx(loss_of_guessing(loss, classes), rel=1e-6)


@pytest.mark.parametrize("is_mixed", [True, False])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy"])
def test_no_batch_of_weighted_images_has_a_higher_loss_of_guessing(loss, label_smoothing, is_mixed):
    """The highest is that of images of the class with the largest weight alone."""
    weights, labels = np.array([0.5, 1500, 2], np.float32), tf.constant([0, 1, 2, 1, 1, 1, 2, 2])
    rows = tf.constant(Mixing(0.4, 0.0).random_numbers(8, 0, np.arange(8))) if is_mixed else None
    found = make_loss(loss, label_smoothing, weights)(tf.zeros([8, 3]), labels, rows).numpy()
    assert found.max() == found[4] == pytest.approx(loss_of_guessing(loss, 3, weights), rel=1e-6)


@pytest.mark.parametrize(("kind", "flags_", "first"), [
    ("python", ["--model=convnet", "--optimizer=sgd", "--learning_rate=0:0.01,2:1e12"], 24),
    pytest.param("mpirun", ["--model=bn_convnet", "--image_size=16", "--optimizer=sgd", "--learning_rate=0:0.1,1:1e25"],
                 13, marks=pytest.mark.trainings),
])
def test_all_workers_stop_at_the_same_step(kind, flags_, first, tmp_path):
    done = run(kind, 2, PROGRAM, *flags_, "--epochs=6", "--warmup=none", "--checkpoint_every=1",
               f"--output_dir={tmp_path}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if "train.py: " in line]
    assert len(errors) == 3  # of rank 0 alone
    step = int(errors[0].split("diverged at step ")[1].split()[0])
    assert first <= step <= first + 12
    for word in ("epoch ", "learning rate ", "first gradient that is not finite"):
        assert word in errors[0]
    assert f"the last good checkpoint: {tmp_path}/checkpoints/step-" in errors[1]
    assert "try a lower --learning_rate" in errors[2]
    assert f"report: {tmp_path}/report.html" in done.stderr
    assert [row["epoch"] for row in rows(tmp_path)] == list(range(1, len(rows(tmp_path)) + 1))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["diverged"] and summary["diverged_at"]["step"] == step and summary["classes"] == 10
    assert f"(epoch {summary['diverged_at']['epoch']:.3f}," in errors[0]


@dataclasses.dataclass(frozen=True)
class Poisoned(synthetic.SyntheticFeed):
    """Random images, some samples of the stream of which are so large that no network survives them."""

    poison: frozenset = frozenset()
    read: list = dataclasses.field(default_factory=list)

    def prepare(self, ranges, batch_size, micro_batch_size, skip=0, neighbours=1, image_size=None):
        return *ranges[0], batch_size, skip

    @contextlib.contextmanager
    def open(self, prepared):
        position, steps, batch_size, skip = prepared

        def batches():
            for start in range(position + skip * batch_size, position + steps * batch_size, batch_size):
                self.read.append(start)
                random = np.random.default_rng(start)
                images = random.uniform(0, 255, (batch_size, 8, 8, 3)).astype(np.float32)
                images *= 1e30 if self.poison & set(range(start, start + batch_size)) else 1
                yield images, random.integers(0, 10, (batch_size, 1))

        shapes = (tf.TensorSpec((batch_size, 8, 8, 3)), tf.TensorSpec((batch_size, 1), tf.int64))
        yield SimpleNamespace(iterator=iter(tf.data.Dataset.from_generator(batches, output_signature=shapes)),
                              admit=lambda batches: Admitted())


def poisoned_setup(poison=(), words=(), class_weights=None):
    """A setup of 40 steps of 32 on 640 samples of ten classes, with a checkpoint every 4 steps."""
    from distributed.exchange import GradientExchange
    from distributed.world import World
    from training import build
    from training.state import State

    hvd.init()
    settings = flags.parse(["train.py", "--model=convnet", "--image_size=8", "--batch_size=32", "--epochs=2",
                            "--checkpoint_every=0.2", "--optimizer=sgd", "--learning_rate=0.001", "--warmup=none",
                            *words])
    dataset = dataclasses.replace(synthetic.synthetic_dataset("synthetic:640"), classes=tuple("0123456789"))
    feed = Poisoned(dataset, 8, 0, poison=frozenset(poison))
    model = build.make_model(settings.recipe, dataset)
    state = State(model, build.make_optimizer(settings.recipe, model))
    return build.make_setup(settings, plan_for(settings, 1, 1, 640), World(), feed, state, GradientExchange(),
                            class_weights)


def test_a_job_knows_the_weights_of_its_classes():
    """A rare image that is wrong: its loss of 8 is multiplied by 1,500, and the batch has four images."""
    weights, norms = np.array([0.5] * 9 + [1500], np.float32), np.ones(6)
    plain, weighted = poisoned_setup().divergence, poisoned_setup(class_weights=weights).divergence
    assert "over 1000 times that of guessing" in plain(8 * 1500 / 4, norms) and weighted(8 * 1500 / 4, norms) is None
    assert weighted(999 * 1500 * math.log(10), norms) is None
    assert "over 1000 times that of guessing" in weighted(1001 * 1500 * math.log(10), norms)


def rolled_back(tmp_path, poison, rollbacks=3):
    """(a function that trains, its feed, its observer's memory, its state) of 40 steps of 32 on 640 samples, with a
    checkpoint every 4 steps, and an elastic training's commit every 10. The observer sees progress and commit.
    """
    from training import loop, recovery

    seen, setup = [], poisoned_setup(poison, ["--on_divergence=rollback", f"--max_rollbacks={rollbacks}"])
    observer = SimpleNamespace(step=lambda update: None, launching=Observer().launching,
                               evaluation=lambda evaluation: seen.append(evaluation.row),
                               rewind=lambda progress: seen.append((dataclasses.replace(progress), made.committed)))
    (tmp_path / "checkpoints").mkdir()
    made = recovery.Recovery(setup, RunFolder(tmp_path), Checkpoints(tmp_path / "checkpoints", {}), StopRequest(),
                             hosts=SimpleNamespace(check_host_updates=lambda: None))
    made.begin()

    def train():
        while True:
            try:
                return loop.follow_plan(setup, made, [observer])
            except divergence.Diverged as problem:
                made.roll_back(problem, [observer])

    return train, setup.feed, seen, setup.state


@pytest.fixture
def ten_classes(monkeypatch):
    monkeypatch.setattr(synthetic, "CLASSES", 10)
    monkeypatch.setattr(Checkpoints, "is_writing", False)  # on a busy disk, checkpoints would be postponed


@pytest.mark.trainings
def test_rolling_back_passes_over_the_data_that_did_it(tmp_path, ten_classes):
    train, feed, seen, state = rolled_back(tmp_path, {30 * 32 + 5})  # sample 5 of the batch of step 30
    train()
    assert state.progress.step == 40 and state.progress.rollbacks == 1
    # Back to the checkpoint of step 28, on with the batch after the 31st: those of steps 28 to 30 are passed over.
    assert state.progress.skipped == 3 * 32 and state.progress.samples == 40 * 32
    read = [start // 32 for start in feed.read]  # TensorFlow reads a batch ahead
    assert list(dict.fromkeys(read)) == list(range(43)) and all(read.count(batch) == 1 for batch in range(31))
    assert np.isfinite([v.numpy().sum() for v in state.model.trainable_variables]).all()
    assert [row["epoch"] for row in seen if isinstance(row, dict)] == [1, 2]
    # The commit before step 30 has the weights that diverged, and would undo the rollback if a worker were lost now.
    [(_, committed)] = [one for one in seen if not isinstance(one, dict)]
    assert (committed.progress.step, committed.progress.rollbacks, committed.progress.skipped) == (28, 1, 3 * 32)
    path = str(tmp_path / "checkpoints" / "step-00000028" / "variables")
    for name, tensor in committed.tensors.items():
        assert np.array_equal(tensor, tf.train.load_variable(path, name)), name


def test_it_rolls_back_so_many_times_and_no_more(tmp_path, ten_classes):
    train, _, seen, _ = rolled_back(tmp_path, range(10 * 32, 64 * 32), rollbacks=2)
    with pytest.raises(UserError, match=r"after 2 rollbacks; the last good checkpoint: .*step-00000000"):
        train()
    rewound = [one for one in seen if not isinstance(one, dict)]
    assert [progress.rollbacks for progress, _ in rewound] == [1, 2]
    # Diverged at a checkpoint's very step its weights are suspected, and the one before is taken: of step 4, then.
    assert [progress.skipped // 32 for progress, _ in rewound] == [3, 8]


@pytest.mark.trainings
def test_a_rollback_to_the_first_phase_hands_over_to_its_workers(tmp_path, monkeypatch):
    """The weights explode in the first phase's last step, on one worker. The second one finds it, on two."""
    monkeypatch.setenv("POISONED_SAMPLES", str(10 * 128))
    flags = (ROOT / "train.py", DIGITS, *TINY, "--batch_size=0:128,1:256", "--micro_batch_size=64", "--epochs=2",
             "--workers_schedule=0:1,1:2", "--on_divergence=rollback", "--observer=tests.rigs.poison:Poison",
             f"--output_dir={tmp_path}")
    for workers, following, where in ((1, 2, "after step 11 of 16"), (2, 1, "after step 0 of 16"),
                                      (1, 2, "after step 11 of 16")):
        done = run("mpirun", workers, *flags)
        needed = f"the phase {where} needs {plural(following, 'worker')}; continue there with "
        assert done.returncode == 75 and needed in done.stderr, done.stderr
        assert json.loads((tmp_path / "run.json").read_text())["next_workers"] == following
        assert done.stderr.count("rolled back to") == (workers == 2)
    assert run("mpirun", 2, *flags).returncode == 0
    assert len(rows(tmp_path)) == 2
    for row in rows(tmp_path):  # 11 steps do not read all of the first epoch
        assert row["skipped"] == 1437 + 256 and math.isfinite(row["val_loss"])
