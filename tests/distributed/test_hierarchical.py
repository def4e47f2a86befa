"""Who sends what between the nodes in a hierarchical all-reduce, on two emulated hosts with two workers each."""
import pytest
from conftest import emulated_hosts, warm_python

from benchmarks.allreduce_hosts import start

COUNT = 2**21  # gradients, 8 MB: negotiation and packets' heads are next to nothing
# On a host, memory is shared; so what a worker writes goes to another host.
SENT = """
import json, sys
from mpi4py import MPI
import horovod.tensorflow as hvd, tensorflow as tf
from benchmarks.allreduce_hosts import INTERFACE
from distributed.exchange import GradientExchange
from distributed.hierarchical import Hierarchical

world, count = MPI.COMM_WORLD, int(sys.argv[1])
exchange = GradientExchange(Hierarchical(2, world.size // 2))
hvd.init(process_sets=exchange.process_sets)
gradient = tf.fill([count], 1.0 + hvd.rank())
averaged = tf.function(lambda: exchange([gradient])[0], autograph=False)

def sent():
    world.Barrier()
    with open("/proc/net/dev") as device, open("/proc/self/io") as written:
        host = next(int(line.split()[9]) for line in device if line.strip().startswith(INTERFACE))
        found = host, next(int(line.split()[1]) for line in written if line.startswith("wchar"))
    world.Barrier()
    return found

assert averaged().numpy().max() == averaged().numpy().min() == (world.size + 1) / 2
found = []
for _ in range(5):
    before = sent()
    averaged()
    found.append([after - first for after, first in zip(sent(), before, strict=True)])
everyone = world.allgather([min(one) for one in zip(*found)])
if world.rank == 0:
    print(json.dumps(everyone))
"""


def test_only_masters_send_between_nodes_and_as_much_as_a_ring_of_them():
    with emulated_hosts("h1", "h2") as hosts:
        script = hosts.top / "sent.py"
        script.write_text(SENT)
        everyone = start(hosts, ["h1", "h2"], 2, [warm_python(), str(script), str(COUNT)])
    nodes = len(everyone) // 2
    expected = 2 * (nodes - 1) / nodes * 4 * COUNT
    for rank, (host, worker) in enumerate(everyone):
        assert host == pytest.approx(expected, rel=0.08), everyone  # with the heads of packets
        assert worker == pytest.approx(expected if rank % 2 == 0 else 0, abs=0.02 * expected), everyone
