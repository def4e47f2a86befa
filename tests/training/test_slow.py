"""Slow workers are named: simulated ones, and real ones whose computation or data take longer."""
import contextlib
import re
import time

import numpy as np
import psutil
import pytest
from conftest import ROOT, rows, start, train, trainers

from distributed.world import World
from tests.rigs.trainings import wait_for
from training.breakdown import SlowWorkers, StepTimes, WorkerTimes

FLAGS = ("--flagfile=recipes/digits.flags", "--model=convnet", "--batch_size=16", "--learning_rate=0.5",
         "--warmup_epochs=1")


SLOW_RANK_1 = f"""
import os, runpy, sys, time
import tensorflow as tf
from data import feed
from data.staging import spool
from training import losses

SECONDS, cross_entropy = 0.08, losses.cross_entropy

def late(logits, *others, **options):
    pause = tf.numpy_function(lambda _: (time.sleep(SECONDS), tf.float32.as_numpy_dtype(0))[1], [logits], tf.float32)
    with tf.control_dependencies([pause]):
        return cross_entropy(tf.identity(logits), *others, **options)

def admit(self, batches):
    time.sleep(SECONDS)
    return spool.Admitted(SECONDS)

part = sys.argv.pop(1)
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    if part == "data":
        feed.Batches.admit = admit
    else:
        losses.cross_entropy = late
sys.argv[0] = "{ROOT / 'train.py'}"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def timed(seconds) -> WorkerTimes:
    """Times of workers on nodes with four each. seconds: (steps, workers, 2): computing, waiting for data."""
    found = []
    for own in np.swapaxes(seconds, 0, 1):
        times = StepTimes()
        for compute, data in own:
            times.add_timed(0.3, [data, 0.3 - compute - data])
        found.append(times.gather(World()).sums)
    return WorkerTimes([f"node{rank // 4}" for rank in range(len(found))], np.concatenate(found))


def usual(generator, steps=5, workers=64, noise=0.05):
    """Seconds of equal workers: 80 ms computing and 2 ms waiting, with noise."""
    return np.array([0.08, 0.002]) * generator.lognormal(0, noise, [steps, workers, 2])


@pytest.mark.parametrize("seed", range(20))
def test_of_equal_workers_with_noise_none_is_named(seed):
    generator, slow = np.random.default_rng(seed), SlowWorkers()
    for _ in range(30):
        noise = generator.choice([0.02, 0.2])
        assert slow.add(timed(usual(generator, generator.integers(1, 9), noise=noise)), [1] * 64) == []


@pytest.mark.parametrize(("part", "said"), [
    (0, r"rank 37 on node9 computes 2[0-4]% slower than the median: the others wait 1[6-9](\.\d)? ms of each step.*"),
    (1, r"rank 37 on node9 waits 1[6-9](\.\d)? ms longer for data than the median: the others wait 1[6-9].*")])
def test_a_slow_worker_is_named_after_the_second_evaluation_until_it_is_fast_again(part, said):
    generator, slow, named = np.random.default_rng(0), SlowWorkers(), []
    for evaluation in range(6):
        seconds = usual(generator, noise=0.02)
        if 1 <= evaluation <= 3:
            seconds[:, 37, part] += 0.22 * 0.08
        named.append(slow.add(timed(seconds), [1] * 64))
    assert [len(one) for one in named] == [0, 0, 1, 1, 0, 0]
    assert re.fullmatch(said, named[2][0]), named


def test_of_two_workers_the_slower_one_is_named():
    generator, slow = np.random.default_rng(0), SlowWorkers()
    for expected in (0, 1):
        seconds = usual(generator, workers=2, noise=0.02)
        seconds[:, 1, 0] *= 1.22
        assert len(slow.add(timed(seconds), [1, 1])) == expected


def test_what_was_slow_is_forgotten_when_workers_change():
    generator, slow = np.random.default_rng(0), SlowWorkers()
    for workers, expected in ((8, 0), (4, 0), (4, 1), (8, 0)):
        seconds = usual(generator, workers=workers, noise=0.02)
        seconds[:, 3, 0] *= 1.5
        assert len(slow.add(timed(seconds), [1] * workers)) == expected


def test_few_timed_steps_are_taken_together():
    generator, slow, named = np.random.default_rng(0), SlowWorkers(), []
    for _ in range(8):
        seconds = usual(generator, steps=1, noise=0.02)
        seconds[:, 37, 0] *= 1.5
        named += [len(slow.add(timed(seconds), [1] * 64))]
    assert named == [0] * 7 + [1]


def test_a_worker_with_more_micro_batches_is_not_slow():
    generator, slow = np.random.default_rng(0), SlowWorkers()
    for _ in range(3):
        seconds = usual(generator, workers=4, noise=0.02)
        seconds[:, 0] *= 2
        assert slow.add(timed(seconds), [2, 1, 1, 1]) == []


@pytest.mark.trainings
@pytest.mark.parametrize(("slow_part", "said"), [
    ("compute", r"computes \d+% slower"),
    pytest.param("data", r"waits \d+(\.\d)? ms longer for data", marks=pytest.mark.campaign)])
def test_a_real_worker_that_is_slow_is_named(slow_part, said, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_RANK_1)
    folder = tmp_path / "run"
    done = train(slow_part, *FLAGS, "--epochs=4", f"--output_dir={folder}", kind="mpirun", workers=2,
                 program=tmp_path / "slow.py")
    logged = rows(folder, "times.jsonl")
    named = [sentence for row in logged for sentence in row["slow"]]
    slow = [one for one in named if re.match(rf"rank 1 on \S+ {said} than the median: the others wait \d", one)]
    assert slow  # on a busy machine, another worker can be slow, too
    assert logged[0]["slow"] == [] and np.shape(logged[1]["workers"]) == (2, 3) and len(logged[1]["hosts"]) == 2
    assert [line for line in done.stderr.splitlines() if "than the median" in line] == [
        f"train.py: warning: {one}" for one in named]
    assert named[-1] in (folder / "report.html").read_text()


@pytest.mark.campaign
def test_a_worker_that_is_suspended_again_and_again_is_named(tmp_path):
    """Its process gets a third of the time, as under a quota. At 60 %, the few timed steps can miss it."""
    folder = tmp_path / "run"
    launcher = start(folder, 2, [*FLAGS, "--model=resnet20", "--batch_size=32", "--epochs=12", "--evaluate_every=3"])
    wait_for(lambda: (folder / "steps.jsonl").exists(), launcher)
    slow = trainers(launcher)[1]
    with contextlib.suppress(psutil.NoSuchProcess):
        while launcher.poll() is None:
            slow.suspend()
            time.sleep(0.04)
            slow.resume()
            time.sleep(0.02)
    assert launcher.wait(300) == 0
    named = [sentence for row in rows(folder, "times.jsonl") for sentence in row["slow"]]
    assert named and all(one.startswith("rank 1 on ") for one in named), named


@pytest.mark.campaign  # on a busy machine, one can be slow
def test_no_real_worker_is_named_if_none_is_slow(tmp_path):
    done = train(*FLAGS, "--epochs=4", f"--output_dir={tmp_path / 'run'}", kind="mpirun", workers=2)
    assert "than the median" not in done.stderr
    assert all(len(row["workers"]) == 2 and not row["slow"] for row in rows(tmp_path / "run", "times.jsonl"))
