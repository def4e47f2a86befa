"""Workers with different numbers of threads make the same weights: sums in an optimizer have one order."""
import pytest
from conftest import run as run_program

PROGRAM = """
import hashlib, importlib, sys
import numpy as np, tensorflow as tf
from model_zoo.whitened_convnet import ConstantNorm
module, name, threads, named, *shapes = sys.argv[1:]
tf.config.threading.set_intra_op_parallelism_threads(int(threads))
random = np.random.default_rng(0)
variables = [tf.Variable(random.normal(size=shape).astype(np.float32), name=named,
                         constraint=ConstantNorm() if len(shape) == 4 else None)
             for shape in (tuple(map(int, shape.split("x"))) for shape in shapes)]
optimizer = getattr(importlib.import_module(module), name)(1.0, weight_decay=1e-4)
for _ in range(3):
    optimizer.apply_gradients([(tf.constant(random.normal(size=v.shape).astype(np.float32)), v) for v in variables])
print(hashlib.sha256(b"".join(v.numpy().tobytes() for v in variables)).hexdigest())
"""


@pytest.mark.trainings
@pytest.mark.parametrize(("module", "name", "named", "shapes"), [
    ("optim.lars", "LARS", "Variable", "2048x1000 3x3x256x256 3x3x256x256 7 65536 65537 1x262144 99x9999 300x400 "
     "300x400"),
    ("optim.muon", "Muon", "kernel", "2048x1000 3x3x256x256 3x3x256x256 7x7x3x64 3136x10 99x9999")])
def test_workers_with_different_numbers_of_threads_have_the_same_weights(module, name, named, shapes):
    done = [run_program("python", 1, "-c", PROGRAM, module, name, threads, named, *shapes.split(), cold=True)
            for threads in (1, 2, 4)]
    assert all(one.returncode == 0 for one in done), done[0].stderr
    assert len({one.stdout for one in done}) == 1
