"""Weights that differ between workers: a flipped bit is found, equal weights never are, and the message names whom."""
import json

import numpy as np
import pytest
import tensorflow as tf
from conftest import DIGITS, run, train

from training import weight_check

SHAPES = ((3, 3, 3, 16), (64, 10), (10,), (1,))
# Flips a bit of a variable before a step, on one rank. Arguments: rank, step, variable, bit; then the flags.
FLIPPING = """
import sys
import numpy as np, tensorflow as tf
import train
from training import pending
rank, step, variable, bit = map(int, sys.argv[1:5])
settle = pending.Pending.settle_before

def flipped(self, next_step):
    if next_step.number == step and self._job.world.rank == rank and not self._job.state.progress.rollbacks:
        one = self._job.state.model.trainable_variables[variable]
        values = one.numpy()
        values.view(np.uint32).flat[0] ^= np.uint32(1 << bit)
        one.assign(values)
    return settle(self, next_step)

pending.Pending.settle_before = flipped
sys.exit(train.main(["train.py", *sys.argv[5:]]))
"""
VARIED = (  # a training without a fault has one of each
    (["--optimizer=lars"], ["--optimizer=sgd", "--learning_rate=0.01"],
     *([f"--optimizer={name}", "--learning_rate=0.002"] for name in ("lamb", "adamw"))),
    (["--precision=float32"], ["--precision=mixed_bfloat16"]),
    (["--compression=none"], ["--compression=fp16"], ["--allreduce=torus"], ["--deterministic"]),
    (["--micro_batch_size=18"], ["--micro_batch_size=6"]),
    (["--ema_decay=0"], ["--ema_decay=0.9"]),
)
SMALL = (DIGITS, "--model=convnet", "--epochs=4", "--batch_size=64", "--augmentation=none")


def variables(random):
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES]


@pytest.fixture(scope="module")
def verdict():
    """Whether workers with these weights differ, by the sums over them, as a step computes them."""
    digits = tf.function(lambda *own: weight_check.digits(own, tf.constant(True)))

    def found(workers):
        sums = tf.add_n([digits(*map(tf.constant, own)) for own in workers])
        return weight_check.differ(sums.numpy(), len(workers))

    return found


def test_each_of_200_flipped_bits_is_found(verdict):
    random = np.random.default_rng(0)
    for _ in range(200):
        weights, workers = variables(random), int(random.integers(2, 9))
        everyone = [[one.copy() for one in weights] for _ in range(workers)]
        bits = everyone[random.integers(workers)][random.integers(len(SHAPES))].view(np.uint32).reshape(-1)
        bits[random.integers(len(bits))] ^= np.uint32(1 << int(random.integers(32)))
        assert verdict(everyone)


def test_equal_weights_are_equal(verdict):
    """On up to 4,096 workers, also infinite ones."""
    random = np.random.default_rng(1)
    for workers in (1, 2, 3, 50):
        weights = variables(random)
        weights[0].flat[0] = np.inf
        assert not verdict([weights] * workers)
    largest = np.repeat(np.float32([63 * 4096, 63 ** 2 * 4096]), 6)
    assert weight_check.MOST_WORKERS >= 4096 and not weight_check.differ(largest, 4096)
    one_less = largest - np.eye(12)[0] - np.eye(12)[6] * (63 ** 2 - 62 ** 2)
    assert weight_check.differ(one_less, 4096)


def test_an_exchange_of_values_between_variables_is_found(verdict):
    """The sum of all bits is the same."""
    one, other = np.float32([1.0, 2.0]), np.float32([3.0, 4.0])
    assert verdict([[one, other], [other, one]])


@pytest.mark.parametrize(("rank", "variable", "bit"), [(0, 2, 3), (2, 5, 0)])
def test_a_training_ends_and_names_the_rank(rank, variable, bit, tmp_path):
    """Three workers: two agree, so the third has the fault, even if it is rank 0."""
    done = run("mpirun", 3, "-c", FLIPPING, rank, 30, variable, bit, *SMALL, "--batch_size=63",
               f"--output_dir={tmp_path}/run")
    lines = [line for line in done.stderr.splitlines() if "differ" in line]
    assert done.returncode == 1 and len(lines) == 3 and len({*lines}) == 1, done.stderr  # on each rank
    assert f"the weights of rank {rank} on " in lines[0] and "differ from those of 2 workers: model/" in lines[0]
    assert "they were equal after step 24" in lines[0] and "test the memory" in lines[0]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["diverged"] is True


def test_a_rollback_continues(tmp_path):
    flags = *SMALL, "--on_divergence=rollback", "--checkpoint_every=0.5"
    done = run("mpirun", 2, "-c", FLIPPING, 1, 50, 0, 0, *flags, f"--output_dir={tmp_path}/run")
    assert done.returncode == 0 and done.stderr.count("; rolled back to ") == 1, done.stderr
    assert "warning" not in done.stderr


def test_other_variables_are_compared_at_the_end():
    """Batch norm's moving statistics are not part of the message of an update."""
    program = (
        "import tensorflow as tf; from types import SimpleNamespace; from training import run, weight_check\n"
        "same = lambda: len({*world.gather(run.digest(model), 'digests')}) == 1\n"
        "world = run.worlds.start(0)\n"
        "model = SimpleNamespace(variables=[tf.Variable([0.5, world.rank * 1e-8], name='moving_mean')])\n"
        "print('found:', same(),\n"
        "      weight_check.differing_weights(world, {'moving_mean': model.variables[0]}))\n"
        "model.variables = [tf.Variable(0.5)]\n"
        "print('same:', same())")
    done = run("mpirun", 2, "-c", program)
    assert done.stdout.count("found: False the weights of rank") == 2 and "moving_mean" in done.stdout
    assert done.stdout.count("same: True") == 2


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 50))])
def test_trainings_without_a_fault_are_silent(seed, tmp_path):
    """Whatever their settings are."""
    random = np.random.default_rng(seed)
    chosen = [flag for flags in VARIED for flag in flags[random.integers(len(flags))]]
    workers = int(random.choice([2, 4]))
    done = train(*SMALL, "--epochs=2", "--batch_size=72", "--warmup=none", *chosen, f"--output_dir={tmp_path}",
                 kind="mpirun", workers=workers)
    assert "differ" not in done.stderr
