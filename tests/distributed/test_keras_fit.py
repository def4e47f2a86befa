"""LARS and Muon in somebody else's Keras code: compile and fit, with Horovod's own wrap and none of our loop."""
import json

import numpy as np
import pytest
from conftest import ROOT, run

pytestmark = pytest.mark.trainings

FIT = """
import json, sys
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from optim.lars import LARS
from optim.muon import Muon

hvd.init()
tf.keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
images, labels = random.normal(size=(256, 8, 8, 3)).astype(np.float32), random.integers(0, 4, 256)
model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(8, 3, activation="relu", input_shape=(8, 8, 3)), tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(4)])
optimizer = hvd.DistributedOptimizer(eval(sys.argv[1]))
model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
before = model.get_weights()
own = np.arange(256).reshape(-1, hvd.size(), 32 // hvd.size())[:, hvd.rank()].reshape(-1)  # each batch's shard
model.fit(images[own], labels[own], batch_size=32 // hvd.size(), epochs=3, shuffle=False, verbose=0,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
if hvd.rank() == 0:
    print(json.dumps([[w.tolist() for w in weights] for weights in (before, model.get_weights())]))
"""


@pytest.mark.parametrize("optimizer", ["LARS(5.0, weight_decay=1e-4, exclude=('bias',))",
                                       "Muon(0.02, weight_decay=0.1)"])
def test_two_workers_train_one_workers_weights(optimizer):
    found = []
    for kind, workers in (("python", 1), ("mpirun", 2)):
        done = run(kind, workers, "-c", FIT, optimizer)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout))
    (before, single), (same, shared) = found
    for start, also, a, b in zip(before, same, single, shared, strict=True):
        np.testing.assert_array_equal(start, also)
        assert np.abs(np.subtract(a, start)).max() > 1e-3  # they have learnt
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_lines_of_the_docs_train():
    program = (ROOT / "docs" / "keras.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert "LARS(" in program and len(program.splitlines()) <= 15
    done = run("mpirun", 2, "-c", program)
    assert done.returncode == 0, done.stderr[-3000:]
    accuracy = float(done.stdout.splitlines()[-1].partition("accuracy: ")[2].split()[0])
    assert accuracy > 0.96
