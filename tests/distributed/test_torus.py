"""Torus and hierarchical over every grid of 1 to 8 workers, the torus of 16, in real processes; float16; bytes sent."""
import json
import subprocess

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT, environment, launcher, require_tool, run, unshare

from distributed import float16
from distributed.exchange import GradientExchange, buckets
from distributed.optimizer import build, wrap
from optim.lars import SGD
from plan.grids import grids
from training.step import average

CASES = ROOT / "tests" / "rigs" / "torus_cases.py"
CAMPAIGN = pytest.mark.campaign
# Launcher, workers, and whether the steps are also taken by what elastic workers and NCCL have.
WORLDS = [("python", 1, False), pytest.param("mpirun", 2, False, marks=pytest.mark.trainings),
          pytest.param("horovodrun", 3, False, marks=pytest.mark.trainings),
          pytest.param("mpirun", 4, True, marks=pytest.mark.trainings),
          pytest.param("horovodrun", 6, True, marks=CAMPAIGN),
          pytest.param("mpirun", 8, False, marks=CAMPAIGN)]
BRIEF = [("horovodrun", 6),
         *(pytest.param(*world, marks=CAMPAIGN) for world in (("mpirun", 5), ("horovodrun", 7), ("mpirun", 16)))]
HALF = 2.0 ** -11  # float16 rounds to so much of a value


def results(kind, workers, *arguments):
    """What each rank has found, by way."""
    done = run(kind, workers, CASES, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.removeprefix("[0]<stdout>:"))
    assert len(found) == workers
    return found


@pytest.mark.parametrize(("kind", "workers", "by_others"), WORLDS)
def test_every_grid_gives_the_mean_on_all_workers(kind, workers, by_others):
    ours, *others = results(kind, workers, *["others"] * by_others)
    names = {f"{x}x{y}" for x, y in grids(workers) if workers > 1}
    ways = ("", " all-to-all", " rings") if by_others else ("",)
    hierarchical = {f"hierarchical {x}x{y}" for x, y in grids(workers) if 1 not in (x, y)}
    assert set(ours) == {"ring"} | {name + way for name in names for way in ways} | hierarchical
    for way, found in ours.items():
        assert found["error"] < 3e-7 * workers, way
        assert all(other[way]["digest"] == found["digest"] for other in others), way  # to the bit, on every rank
        mean = [pytest.approx(1e6 + (workers - 1) / 2, rel=1e-7)] * 3  # in float32, whatever the compression
        assert found["statistics"] == [mean, mean, [[1], [1]]], way
        assert found["gathered"] == [[[total] * 3, [total**2] * 3] for total in (workers, 2 * workers)], way
        assert found["first"] < 3e-7 * workers, way
        # each partial sum rounds once
        assert (found["fp16"] < 2 * workers * HALF if workers > 1 else found["fp16"] < 1e-7), way
        assert found["again"], way
        if workers > 1:
            assert found["large"] < workers * HALF and found["small"] < workers * HALF, way
            assert found["infinite"] == ["inf", "-inf", 3000 - 2] and found["undefined"] == [True, 128], way


@pytest.mark.trainings
@pytest.mark.parametrize(("kind", "workers"), BRIEF)
def test_more_workers(kind, workers):
    """No more than the torus in float32."""
    ours, *others = results(kind, workers, "brief")
    assert set(ours) == {f"{x}x{y}" for x, y in grids(workers)}
    for way, found in ours.items():
        assert found["error"] < 3e-7 * workers, way
        assert all(other[way]["digest"] == found["digest"] for other in others), way


def test_buckets_are_filled_from_the_last_gradient_on():
    assert buckets([5, 1, 2, 3, 4], 7) == [[4, 3], [2, 1], [0]]
    assert buckets([1, 9, 1], 4) == [[2], [1], [0]]  # one that is larger has a bucket of its own
    assert buckets([], 4) == []


@pytest.mark.parametrize("magnitude", [1e-37, 6e-8, 0.1, 1.0, 2.0, 65504.0, 1e9, 3e38])
def test_the_scale_is_the_power_of_two_that_leaves_room_for_growth(magnitude):
    scale, without = float16.scales(tf.constant([magnitude, 0.0])).numpy().astype(np.float64)
    assert np.frexp(scale)[0] == 0.5 and np.frexp(without)[0] == 0.5
    if scale < 2.0**100:  # as far as the inverse goes
        assert 2**11 <= scale * magnitude < 2**12  # 16 times below the largest float16
    assert 2.0**-126 <= scale <= 2.0**100


GROWING = """
import json
import horovod.tensorflow as hvd, numpy as np, tensorflow as tf
from distributed.exchange import COMPRESSIONS, GradientExchange, Ring
from distributed.float16 import initial_scales
from distributed.optimizer import build, wrap
from optim.lars import SGD
from training.step import average

class Counted(Ring):
    def sum(self, tensors, compression, name):
        is_half = compression is COMPRESSIONS["fp16"]
        return [self.counted(one, sent[int(is_half)]) for one in super().sum(tensors, compression, name)]
    def counted(self, tensor, count):
        with tf.control_dependencies([count.assign_add(1)]):
            return tf.identity(tensor)

hvd.init()
sent, variables = [tf.Variable(0), tf.Variable(0)], [tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros(3))]
optimizer, exchange = wrap(SGD(0.0)), GradientExchange(Counted(), "fp16")
build(optimizer, variables)
exchange.scales = initial_scales(2)
@tf.function(autograph=False)
def averaged(*gradients):
    means, _ = average(exchange, optimizer, gradients, variables, 2)
    return [mean.value for mean in means]

found = []
for size in (1.0, 1.0, 10.0, 1e4, 1e4):
    [one.assign(0) for one in sent]
    first, second = averaged(tf.fill([3], size * (1 + hvd.rank())), tf.fill([3], 0.5))
    found.append([[int(one) for one in sent], first.numpy().tolist(), second.numpy().tolist()])
print(json.dumps(found) if hvd.rank() == 0 else "", end="")
"""


def test_a_sum_that_overflows_is_exchanged_again_in_float32():
    """Two gradients in float16, and the magnitudes; in float32, too, at first and where one grows 1,000 times."""
    done = run("mpirun", 2, "-c", GROWING)
    assert done.returncode == 0, done.stderr[-3000:]
    counts, *gradients = zip(*json.loads(done.stdout), strict=True)
    once, twice = [1, 2], [3, 2]  # of float32 and float16
    assert [*counts] == [twice, once, once, twice, once]
    for size, first, second in zip((1.0, 1.0, 10.0, 1e4, 1e4), *gradients, strict=True):
        assert first == pytest.approx([1.5 * size] * 3, rel=2 * HALF) and second == [0.5] * 3


@pytest.mark.parametrize("count", [3, 40])
def test_a_bucket_leaves_before_the_last_gradient_is_known(count, monkeypatch):
    """In the graph, a ring sends each quarter of the gradients as one group, which depends on no other gradient."""
    hvd.init()
    monkeypatch.setattr(hvd, "size", lambda: 2)
    variables = [tf.Variable(tf.zeros(5)) for _ in range(count)]
    optimizer, exchange = wrap(SGD(0.0)), GradientExchange(None, "fp16")
    build(optimizer, variables)
    exchange.scales = float16.initial_scales(count)
    specs = [tf.TensorSpec([5])] * count

    @tf.function(autograph=False)
    def averaged(*gradients):
        means, _ = average(exchange, optimizer, gradients, variables, 2)
        return [mean.value for mean in means]

    graph = averaged.get_concrete_function(*specs).graph

    def arguments_of(operation) -> set[str]:
        left, seen = [operation], set()
        while left:
            one = left.pop()
            seen.add(one.name)
            before = (*(tensor.op for tensor in one.inputs), *one.control_inputs)
            left += [other for other in before if other.name not in seen]
        return {name for name in seen if name.startswith("gradients")}

    sent = [one for one in graph.get_operations()
            if one.type == "HorovodGroupedAllreduce" and one.inputs[0].dtype == "float16"]
    assert len(sent) == (3 if count == 3 else 4)
    size = -(-count // 4)
    groups = [[f"gradients_{number}" for number in range(start, start + size)] for start in range(0, count, size)]
    assert sorted(map(sorted, map(arguments_of, sent))) == sorted(map(sorted, groups))


WIRE = """
import sys
import horovod.tensorflow as hvd, numpy as np, tensorflow as tf
from distributed.exchange import GradientExchange
from distributed.float16 import initial_scales
from distributed.optimizer import build, wrap
from distributed.torus import ProcessSets
from optim.lars import SGD
from training.step import average

way, compression, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
exchange = GradientExchange(ProcessSets(*map(int, way.split("x"))) if way != "ring" else None, compression)
hvd.init(process_sets=exchange.process_sets or None)
optimizer = wrap(SGD(0.0))
gradient = tf.random.stateless_normal([count], [0, hvd.rank()])
variables = [tf.Variable(gradient)]
build(optimizer, variables)
exchange.scales = initial_scales(1)

@tf.function(autograph=False)
def averaged():
    [mean], _ = average(exchange, optimizer, [gradient], variables, hvd.size())
    return mean.value


def passed():
    hvd.allreduce(tf.zeros([]), name="barrier")
    with open("/proc/net/dev") as file:
        return next(int(line.split()[1]) for line in file if line.strip().startswith("lo:"))

averaged()
found = []
for _ in range(5):  # the median: a busy machine negotiates for longer, or counts bytes late
    before = passed()
    for _ in range(4):
        averaged()
    found.append((passed() - before) / 4)
if hvd.rank() == 0:
    print(sorted(found)[2])
"""
COUNT = 2**21  # gradients, 8 MB: negotiation and packets' heads are next to nothing


@pytest.fixture(scope="module")
def bytes_a_step():
    """A function of (way, compression): the bytes that pass a network interface of their own, on four workers."""
    require_tool("ip")
    words = [*unshare("--net"), "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]

    def measure(way, compression):
        *horovodrun, python = launcher("horovodrun", 4)
        done = subprocess.run([*words, *horovodrun, "--network-interfaces", "lo", python, "-c", WIRE, way, compression,
                               str(COUNT)], env=environment(), text=True, capture_output=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return float(done.stdout.removeprefix("[0]<stdout>:"))

    return measure


@pytest.mark.trainings
def test_the_torus_sends_what_theory_says_and_float16_half_of_it(bytes_a_step):
    """2 (N - 1) / N of the gradients from each of N workers, in a torus as in a ring: 2 (4 - 1) times 8 MB in all."""
    torus, half = bytes_a_step("2x2", "none"), bytes_a_step("2x2", "fp16")
    assert torus == pytest.approx(2 * 3 * 4 * COUNT, rel=0.01)
    assert half == pytest.approx(torus / 2, rel=0.01)
    assert bytes_a_step("ring", "fp16") == pytest.approx(half, rel=0.01)
