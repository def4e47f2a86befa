import json
import time

import numpy as np
import pytest
from conftest import TINY, run, train

SLOW_DATA = """
import sys, threading, time
import tensorflow as tf
import model_zoo, optim
from distributed import optimizer as wrapped
from distributed.exchange import GradientExchange
from distributed.world import start
from training.breakdown import StepTimes, breakdown_of
from training.state import Totals
from training.step import StepInput, StepParts, StepResult, make_train_step

world = start(0)
model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(8)])
optimizer = wrapped.wrap(optim.create_optimizer("sgd", learning_rate=0.0, momentum=0.9))
wrapped.build(optimizer, model.trainable_variables)
accumulation, wait = int(sys.argv[1]), 0.6 if world.rank == 1 else 0.0
wanted = threading.Semaphore(0)  # of micro-batches: none is read ahead of its step

def samples():
    while True:
        wanted.acquire()
        time.sleep(wait)
        yield tf.ones([2, 4]), tf.zeros([2, 1], tf.int32)

iterator = iter(tf.data.Dataset.from_generator(samples, output_signature=(
    tf.TensorSpec([2, 4], tf.float32), tf.TensorSpec([2, 1], tf.int32))))
step = make_train_step(StepParts(model, optimizer, GradientExchange(), Totals(), range(accumulation)))
times, waits = StepTimes(), []
for number in range(7):
    wanted.release(accumulation)
    began = time.perf_counter()
    learned = StepResult.unpacked(
        step(iterator, StepInput.of(0.0, 0.9, timed=True)).numpy(), StepResult.shapes(2))
    if number > 1:  # once it is compiled, and the workers have met
        waits.append([*learned.waited.tolist(), time.perf_counter() - began])
        times.add_timed(waits[-1][-1], learned.waited)
print(world.rank, *[sum(column) / len(waits) for column in zip(*waits)], *breakdown_of(times.gather(world)).values())
world.barrier()
"""


@pytest.mark.trainings
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_worker_waits_for_its_data_and_the_other_for_it(tmp_path, accumulation):
    (tmp_path / "slow.py").write_text(SLOW_DATA)
    done = run("mpirun", 2, tmp_path / "slow.py", accumulation)
    assert done.returncode == 0, done.stderr
    (_, data0, exchange0, step0, *fractions), (_, data1, exchange1, step1, *others) = sorted(
        tuple(map(float, line.split())) for line in done.stdout.splitlines())
    assert data1 >= 0.2 and data1 > exchange1  # a third of the first sleep, which begins a moment before the step
    assert exchange0 > data0
    steps = step0 + step1
    expected = [(data0 + data1) / steps, (exchange0 + exchange1) / steps]
    assert fractions == others and fractions[1:] == pytest.approx(expected, abs=1e-3) and sum(
        fractions) == pytest.approx(1)


@pytest.mark.trainings
def test_each_epochs_shares_are_written_and_the_timeline_too(tmp_path):
    folder, timeline = tmp_path / "run", tmp_path / "timeline.json"
    train(*TINY, "--epochs=2", f"--output_dir={folder}", f"--timeline={timeline}", kind="mpirun", workers=2)
    rows = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    assert [row.pop("epoch") for row in rows] == [1, 2]
    assert [row.pop("samples") for row in rows] == [1536, 2816]  # of 1,437, in batches of 128
    for row in rows:
        assert len(set(row.pop("hosts"))) == 1 and np.shape(row.pop("workers")) == (2, 3) and not row.pop("slow")
        assert list(row) == ["compute", "data", "exchange"]
        assert sum(row.values()) == pytest.approx(1) and min(row.values()) >= 0
    assert "Where the time went" in (folder / "report.html").read_text()
    assert "ALLREDUCE" in timeline.read_text()


def test_a_timeline_without_a_folder_is_one_line(tmp_path):
    done = run("python", 1, "train.py", f"--timeline={tmp_path / 'none' / 'timeline.json'}")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "--timeline: the folder of" in done.stderr


def test_the_host_waits_for_every_tensor():
    import tensorflow as tf

    from training.clock import Clock, on_host

    @tf.function
    def at(timed):
        late = tf.numpy_function(lambda: (time.sleep(0.3), np.float32(1))[1], [], tf.float32)
        clock = Clock(timed)
        return clock.after([tf.ones([2]), tf.IndexedSlices(tf.reshape(late, [1, 1]), tf.constant([0]))])

    began = time.perf_counter()
    assert at(on_host(True)).numpy() - began >= 0.3
    assert at(on_host(False)).numpy() == 0
