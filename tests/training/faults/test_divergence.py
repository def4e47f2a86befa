"""Divergence stops all workers at the same step, by name; rolling back passes over the data that did it."""
import contextlib
import dataclasses
import math
from types import SimpleNamespace

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT, rows, run

from data import synthetic
from training import flags, workers
from training.checkpoints import Checkpoints
from training.faults import divergence
from training.plan import make_plan

NAMES = ["first/kernel", "second/kernel", "third/kernel"]


@pytest.mark.parametrize(("loss", "squares", "loss_scaling", "said"), [
    (2.3, [1, 2, 3], False, None),
    (2300.0, [1, 2, 3], False, None),  # 1,000 times log(10) is 2,303
    (2310.0, [1, 32, 3], False, "1000 times that of guessing; the largest gradient is that of second/kernel"),
    (math.nan, [1, 2, 3], False, "the loss is nan"),
    (math.inf, [1, 2, 3], True, "the loss is inf"),
    (2.3, [1, math.nan, math.inf], False, "that of third/kernel went first"),
    (2.3, [math.inf, math.nan, 5], False, "that of second/kernel went first"),
    (2.3, [math.inf, math.nan, 5], True, None),  # the loss scale sees to it
])
def test_what_is_wrong(loss, squares, loss_scaling, said):
    found = divergence.reason(loss, np.array(squares, np.float32), NAMES, 10, loss_scaling)
    assert (said is None and found is None) or said in found


@pytest.mark.parametrize(("kind", "flags_", "first"), [
    ("alone", ["--model=convnet", "--optimizer=sgd", "--learning_rate=0:0.01,2:1e12"], 24),
    ("mpirun", ["--model=resnet20", "--image_size=16", "--optimizer=sgd", "--learning_rate=0:0.1,1:1e25"], 13),
])
def test_all_workers_stop_at_the_same_step(kind, flags_, first, tmp_path):
    done = run(kind, 2, ROOT / "train.py", *flags_, "--epochs=6", "--warmup=none", f"--output_dir={tmp_path}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if "train.py: " in line]
    assert len(said) == (1 if kind == "alone" else 2) and len(set(said)) == 1
    step = int(said[0].split("diverged at step ")[1].split()[0])
    assert first <= step <= first + 12
    for word in ("epoch ", "learning rate ", " went first", f"the last good checkpoint: {tmp_path}/checkpoints/step-"):
        assert word in said[0]
    assert [row["epoch"] for row in rows(tmp_path)] == list(range(1, len(rows(tmp_path)) + 1))


@dataclasses.dataclass(frozen=True)
class Poisoned(synthetic.SyntheticFeed):
    """Random images, some samples of the stream of which are so large that no network survives them."""

    poison: frozenset = frozenset()
    read: list = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def train(self, position, steps, batch_size, micro_batch_size, skip=0):
        def batches():
            for start in range(position + skip * batch_size, position + steps * batch_size, batch_size):
                self.read.append(start)
                random = np.random.default_rng(start)
                images = random.uniform(0, 255, (batch_size, 8, 8, 3)).astype(np.float32)
                images *= 1e30 if self.poison & set(range(start, start + batch_size)) else 1
                yield images, random.integers(0, 10, (batch_size, 1))

        shapes = (tf.TensorSpec((batch_size, 8, 8, 3)), tf.TensorSpec((batch_size, 1), tf.int64))
        yield SimpleNamespace(iterator=iter(tf.data.Dataset.from_generator(batches, output_signature=shapes)))


def rolled_back(tmp_path, poison, rollbacks=3):
    """(the fit, its feed, its observer's memory) of 40 steps of 32 on 640 samples, with a checkpoint every 4 steps."""
    from training import fit

    hvd.init()
    config, _ = flags.parse(["train.py", "--model=convnet", "--image_size=8", "--batch_size=32", "--epochs=2",
                             "--on_divergence=rollback", f"--max_rollbacks={rollbacks}", "--checkpoint_every=0.2",
                             "--optimizer=sgd", "--learning_rate=0.001", "--warmup=none"])
    dataset = dataclasses.replace(synthetic.synthetic_dataset("synthetic:640"), classes=tuple("0123456789"))
    feed = Poisoned(dataset, 8, 0, poison=frozenset(poison))
    model = fit.make_model(config, dataset)
    state = fit.make_state(config, model, fit.make_optimizer(config, model))
    seen = []
    observer = SimpleNamespace(step=lambda samples, layers: None,
                               evaluation=lambda row, layers, shares: seen.append(row),
                               go_back=lambda place: seen.append(dataclasses.replace(place)))
    (tmp_path / "checkpoints").mkdir()
    made = fit.Fit(config, make_plan(config, 1, 640), feed, state, Checkpoints(tmp_path / "checkpoints", {}),
                   [observer])
    return made, feed, seen, state


@pytest.fixture
def ten_classes(monkeypatch):
    monkeypatch.setattr(synthetic, "CLASSES", 10)


def test_rolling_back_passes_over_the_data_that_did_it(tmp_path, ten_classes):
    fit_, feed, seen, state = rolled_back(tmp_path, {10 * 32 + 5})  # sample 5 of the batch of step 10
    fit_.run()
    assert state.place.step == 40 and state.place.rollbacks == 1
    # Back to the checkpoint of step 8, on with the batch after the 11th: the batches of steps 8 to 10 are passed over.
    assert state.place.skipped == 3 * 32 and state.place.samples == 40 * 32
    read = [start // 32 for start in feed.read]  # TensorFlow reads a batch ahead
    assert list(dict.fromkeys(read)) == list(range(43)) and all(read.count(batch) == 1 for batch in range(11))
    assert np.isfinite([v.numpy().sum() for v in state.model.trainable_variables]).all()
    assert [row["epoch"] for row in seen if isinstance(row, dict)] == [1, 2]


def test_it_rolls_back_so_many_times_and_no_more(tmp_path, ten_classes):
    fit_, _, seen, _ = rolled_back(tmp_path, range(10 * 32, 64 * 32), rollbacks=2)
    with pytest.raises(workers.AgreedError, match=r"after 2 rollbacks; the last good checkpoint: .*step-00000000"):
        fit_.run()
    assert [place.rollbacks for place in seen if not isinstance(place, dict)] == [1, 2]
    # Diverged at a checkpoint's very step its weights are suspected, and the one before is taken: of step 4, then.
    assert [place.skipped // 32 for place in seen if not isinstance(place, dict)] == [3, 8]
