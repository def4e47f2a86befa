"""The messages of a training step, counted as packets on four hosts with a network of their own."""
import json

import pytest
from conftest import emulated_hosts, warm_python

from benchmarks.allreduce_hosts import start
from launch.topology import Link, Network, cost

pytestmark = pytest.mark.launchers

# A slice of the gradients and one of the statistics are a packet each: longer than a negotiation message.
STEP = """
import json, os, socket, sys
from mpi4py import MPI
import horovod.tensorflow as hvd, tensorflow as tf
import optim
from benchmarks.allreduce_hosts import EVERY_PROTOCOL, INTERFACE, messages
from distributed.exchange import GradientExchange
from distributed.optimizer import build, wrap
from distributed.torus import ProcessSets
from model_zoo.layers import BatchNormalization
from training.batch_norm import MovingStatistics
from training.state import Totals
from training.step import StepInput, StepParts, make_train_step

os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"  # otherwise the two messages may be fused
world, grid = MPI.COMM_WORLD, tuple(map(int, sys.argv[1].split("x")))
exchange = GradientExchange(ProcessSets(*grid) if 1 not in grid else None)
hvd.init(process_sets=exchange.process_sets or None)
model = tf.keras.Sequential([tf.keras.layers.Input((1, 1, 400)), BatchNormalization(center=False, scale=False),
                             tf.keras.layers.Flatten(), tf.keras.layers.Dense(2)])
optimizer = wrap(optim.create_optimizer("sgd", learning_rate=0.0, momentum=0.9))
build(optimizer, model.trainable_variables)
step, sent = make_train_step(StepParts(model, optimizer, exchange, Totals(), moving=MovingStatistics(model))), []
batches = iter(tf.data.Dataset.from_tensors((tf.ones([2, 1, 1, 400]), tf.zeros([2, 1], tf.int32))).repeat())
for number in range(6):
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(EVERY_PROTOCOL)) as packets:
        packets.bind((INTERFACE, EVERY_PROTOCOL))
        world.Barrier()
        step(batches, StepInput.of(0.1, 0.9))
        world.Barrier()
        sent.append(messages(packets))
everyone = world.allgather(sent[1:])
if world.rank == 0:
    print(json.dumps(everyone))
"""


@pytest.fixture(scope="module")
def hosts():
    with emulated_hosts("h1", "h2", "h3", "h4") as hosts:
        yield hosts


@pytest.mark.parametrize("grid", ["4x1", "2x2"])
def test_a_step_sends_one_message_besides_the_gradients(hosts, grid):
    """Loss, signals and batch norm's statistics together, along the gradients' way: a torus is as short for them."""
    script = hosts.top / "step.py"
    script.write_text(STEP)
    everyone = start(hosts, list(hosts.names[1:]), 1, [warm_python(), str(script), grid])
    link = Link(1e-5, 1e9)
    one = cost(1.0, *map(int, grid.split("x")), Network(1, link, link)).steps  # 6 in a ring, 4 in a torus
    assert one == {"4x1": 6, "2x2": 4}[grid]
    counts = sorted(count for counts in everyone for count in counts)
    assert counts[len(counts) // 2] == 2 * one, json.dumps(everyone)
