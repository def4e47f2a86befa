"""Messages and bytes against rings that really pass numbers round; times against numbers computed by hand."""
import numpy as np
import pytest

from launch import topology
from launch.topology import Link, Network
from plan import grids
from plan.allreduce import plan_allreduce

SIZE = 96  # bytes; a slice of 1/n is a whole number for each ring below


def passes(slices, rings, combine, first, counter):
    """n - 1 steps in which every rank hands one slice to the next rank of its ring. slices: float (ranks, …) by rank.

    first: the offset of the slice that index p starts with. counter: gains the steps and the bytes that rank 0 sends.
    """
    steps = len(rings[0]) - 1
    for step in range(steps):
        sent = {}
        for ring in rings:
            for index, rank in enumerate(ring):
                number = (index + first - step) % len(ring)
                sent[ring[(index + 1) % len(ring)]] = number, slices[rank][number].copy()
                if rank == 0:
                    counter["bytes"] += slices[rank][number].size
        for rank, (number, values) in sent.items():
            slices[rank][number] = combine(slices[rank][number], values)
    counter["steps"] += steps


def all_reduce(data, horizontal, vertical):
    """(what each rank has in the end, steps, bytes sent by rank 0) of a torus. data: float (ranks, SIZE)."""
    counter = {"steps": 0, "bytes": 0}
    ranks = np.arange(horizontal * vertical).reshape(vertical, horizontal)
    in_rows = [row.reshape(horizontal, -1).copy() for row in data]
    passes(in_rows, ranks.tolist(), np.add, 0, counter)
    owned = [(rank % horizontal + 1) % horizontal for rank in range(len(data))]  # the slice that a rank has summed
    in_columns = [in_rows[rank][owned[rank]].reshape(vertical, -1) for rank in range(len(data))]
    columns = ranks.T.tolist()
    passes(in_columns, columns, np.add, 0, counter)
    passes(in_columns, columns, lambda _, new: new, 1, counter)
    for rank in range(len(data)):
        in_rows[rank][owned[rank]] = in_columns[rank].reshape(-1)
    passes(in_rows, ranks.tolist(), lambda _, new: new, 1, counter)
    return np.stack([row.reshape(-1) for row in in_rows]), counter["steps"], counter["bytes"]


@pytest.mark.parametrize("horizontal, vertical",
                         [(1, 1), (2, 1), (1, 2), (6, 1), (1, 6), (2, 2), (4, 2), (2, 4), (3, 4), (4, 3), (4, 4)])
def test_steps_and_bytes_are_those_of_rings_that_pass_numbers(horizontal, vertical):
    data = np.random.default_rng(0).integers(0, 100, (horizontal * vertical, SIZE)).astype(float)
    reduced, steps, sent = all_reduce(data, horizontal, vertical)
    assert (reduced == data.sum(axis=0)).all()  # what was counted is an all-reduce
    cost = topology.cost(SIZE, horizontal, vertical, Network(4, Link(1, 1), Link(1, 1)))
    assert cost.steps == steps == 2 * (horizontal - 1) + 2 * (vertical - 1)
    workers = horizontal * vertical
    assert cost.sent == pytest.approx(sent) == pytest.approx(2 * (workers - 1) / workers * SIZE)


@pytest.mark.parametrize("workers, local_size", [(8, 4), (6, 4), (12, 3), (5, 1), (4, 8), (1, 2)])
def test_the_latency_of_a_ring_is_that_of_its_last_message(workers, local_size):
    """Each rank sends its next message as soon as it has the one before; the clock of every rank is kept."""
    network = Network(local_size, Link(1.0, np.inf), Link(10.0, np.inf), slowdown=3.0)
    clocks = np.zeros(workers)
    for _ in range(workers - 1):  # the reduce-scatter; the all-gather is as long
        hops = [1.0 if (rank - 1) % workers // local_size == rank // local_size else 10.0 for rank in range(workers)]
        clocks = np.maximum(clocks, np.roll(clocks, 1) + hops)
    assert topology.cost(0, workers, 1, network).latency == pytest.approx(3 * 2 * clocks.max())


def test_transfer_by_hand():
    network = Network(2, Link(0, 50.0), Link(0, 10.0))
    # One node: both ranks send 100 bytes at 50 a second.
    assert topology.cost(100, 2, 1, network).transfer == pytest.approx(2)
    # A ring over two nodes: 2 * 3/4 * 100 bytes, one ring leaves each node at 10 a second.
    assert topology.cost(100, 4, 1, network).transfer == pytest.approx(15)
    # Rows are the nodes: 100 bytes at 50; then half of them, 50, in two columns that share 10 a second.
    assert topology.cost(100, 2, 2, network).transfer == pytest.approx(2 + 10)
    # Columns of consecutive nodes: the same bytes, in rows that are one rank.
    assert topology.cost(100, 1, 4, network).transfer == pytest.approx(15)
    assert topology.cost(100, 1, 1, network).transfer == 0


def test_what_is_hidden_is_transfer_never_latency():
    cost = topology.cost(100, 4, 1, Network(2, Link(1, 50.0), Link(2, 10.0)))
    assert cost.latency == 2 * (2 * 2 + 1)  # a pass: two hops between nodes, one within
    assert [cost.seconds(hidden) for hidden in (0, 5, 15, 99)] == pytest.approx([25, 20, 10, 10])


def test_hierarchical_has_rows_that_are_nodes():
    assert topology.grid_of("hierarchical", 32, 4) == (4, 8)
    assert topology.grid_of("hierarchical", 3, 4) == (3, 1)
    assert topology.grid_of("hierarchical", 30, 4) is None
    assert topology.grid_of("ring", 30, 4) == (30, 1)


@pytest.mark.parametrize("local_size", [1, 4, 8])
def test_the_forecast_is_of_the_grid_that_training_takes(local_size):
    for workers in range(2, 4097, 7):
        planned = plan_allreduce("torus", None, workers, local_size)
        assert topology.grid_of("torus", workers, local_size) == (planned.grid or (workers, 1))
        if grid := topology.grid_of("hierarchical", workers, local_size):
            assert grid == (plan_allreduce("hierarchical", None, workers, local_size).grid or (workers, 1))


def by_masters(data, local_size):
    """(what each rank has in the end, steps, bytes sent by rank 0) of Jia et al.'s. data: float (ranks, SIZE)."""
    masters = list(range(0, len(data), local_size))
    data, counter = data.copy(), {"steps": 0, "bytes": 0}
    for offset in range(local_size - 1, 0, -1):  # along each node's chain, to its master
        for master in masters:
            data[master + offset - 1] += data[master + offset]
        counter["steps"] += 1
    slices = {master: data[master].reshape(len(masters), -1) for master in masters}
    passes(slices, [masters], np.add, 0, counter)
    passes(slices, [masters], lambda _, new: new, 1, counter)
    for offset in range(1, local_size):  # and back
        for master in masters:
            data[master + offset] = data[master + offset - 1]
        counter["steps"] += 1
        counter["bytes"] += SIZE if offset == 1 else 0
    return data, counter["steps"], counter["bytes"]


@pytest.mark.parametrize("local_size, nodes", [(2, 2), (4, 2), (2, 4), (3, 4), (4, 6)])
def test_hierarchical_has_the_steps_of_masters_that_pass_numbers(local_size, nodes):
    data = np.random.default_rng(0).integers(0, 100, (local_size * nodes, SIZE)).astype(float)
    reduced, steps, sent = by_masters(data, local_size)
    assert (reduced == data.sum(axis=0)).all()  # what was counted is an all-reduce
    network = Network(local_size, Link(1, 1), Link(1, 1))
    cost = topology.cost(SIZE, local_size, nodes, network, "hierarchical")
    torus = topology.cost(SIZE, local_size, nodes, network)
    assert cost.steps == steps == torus.steps  # arXiv:1811.05233, 2.2: the same amount of GPU-to-GPU operations
    assert cost.latency == torus.latency
    assert cost.sent == pytest.approx(sent) == pytest.approx(SIZE + 2 * (nodes - 1) / nodes * SIZE)


def test_transfer_of_hierarchical_by_hand():
    network = Network(2, Link(0, 50.0), Link(0, 10.0))
    # 100 bytes at 50 to the master and as many back; two masters exchange 2 * 1/2 * 100 bytes at 10.
    assert topology.cost(100, 2, 2, network, "hierarchical").transfer == pytest.approx(2 + 10 + 2)
    # A master sends no faster than its own link, though its node has more.
    wide = Network(2, Link(0, 50.0), Link(0, 100.0))
    assert topology.cost(100, 2, 2, wide, "hierarchical").transfer == pytest.approx(6)
    # One node: a ring.
    assert topology.cost(100, 2, 1, network, "hierarchical") == topology.cost(100, 2, 1, network)


def test_the_grid_is_the_one_that_messages_pass_in_the_least_time():
    for workers in (12, 48, 7):
        network = Network(4, Link(grids.NVLINK_LATENCY, np.inf), Link(grids.NETWORK_LATENCY, np.inf))
        times = {grid: topology.cost(0, *grid, network).latency for grid in grids.grids(workers)}
        assert times[topology.grid_of("torus", workers, 4)] == pytest.approx(min(times.values()))


def test_ring_hierarchical_and_torus_at_the_papers_size():
    """2.2: a ring's latency grows with the number of ranks, the torus's with its sides: 2046 messages against 124."""
    network = Network(4, Link(1e-6, np.inf), Link(1e-5, np.inf))
    exchanges = [("ring", (1024, 1)), ("hierarchical", (4, 256)), ("torus", (4, 256)), ("torus", (32, 32))]
    assert [topology.cost(1, *grid, network, name).steps for name, grid in exchanges] == [2046, 516, 516, 124]


def test_in_the_vertical_step_hierarchical_sends_x_times_what_the_torus_does():
    """arXiv:1811.05233, 2.2. But one rank of each node sends it, where all X of the torus do."""
    between = topology.cost(1, 4, 256, Network(4, Link(0, 1), Link(0, 1)), "hierarchical").sent - 1
    assert between == pytest.approx(4 * grids.sent(4, 256)[1]) == pytest.approx(grids.sent_by_node(4, 256, 4))
