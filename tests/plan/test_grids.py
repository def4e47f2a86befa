import itertools

import pytest

from plan import grids

PAPER = {1024: (32, 32), 2048: (64, 32), 2176: (64, 34), 3456: (72, 48), 4096: (64, 64)}  # table 4, horizontal first


@pytest.mark.parametrize("workers", PAPER)
def test_the_grids_of_the_papers_table_4(workers):
    assert grids.choose(workers, local_size=4) == PAPER[workers]


@pytest.mark.parametrize("ratio, agrees", [(1.4, False), (1.6, True), (2.9, True), (3.1, False)])
def test_the_paper_would_choose_the_same_with_latencies_that_differ_by_one_and_a_half_to_three(monkeypatch, ratio,
                                                                                            agrees):
    monkeypatch.setattr(grids, "NETWORK_LATENCY", ratio * grids.NVLINK_LATENCY)
    assert ({workers: grids.choose(workers, 4) for workers in PAPER} == PAPER) == agrees


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7, 13, 1021])
@pytest.mark.parametrize("local_size", [1, 2, 4, 8])
def test_a_prime_number_of_workers_is_a_ring(workers, local_size):
    assert grids.choose(workers, local_size) == (workers, 1)


def test_all_grids_are_listed_once():
    assert grids.grids(12) == [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]
    assert grids.grids(1) == [(1, 1)]


def test_small_grids():
    assert grids.choose(4, 1) == (2, 2)
    assert grids.choose(6, 2) == (2, 3)  # rows are nodes
    assert grids.choose(12, 4) == (4, 3)
    assert grids.choose(256, 8) == (32, 8)
    assert grids.choose(8, 2) == (2, 4)  # as fast as (4, 2)


@pytest.mark.parametrize("grid, local_size, sent", [
    ((4, 1), 2, 1.5), ((2, 2), 2, 1.0),  # as measured: benchmarks/allreduce_hosts.py, 1.56 and 1.05 MB of 1 MB
    ((8, 1), 2, 1.75), ((4, 2), 2, 1.5 + 2 / 4), ((2, 4), 2, 2 * 2 * (3 / 4) / 2),
    ((8, 2), 8, 1.0), ((1, 3), 3, 0.0)])
def test_what_leaves_a_node(grid, local_size, sent):
    assert grids.sent_by_node(*grid, local_size) == pytest.approx(sent)


def test_no_grid_of_no_workers():
    for workers, local_size in ((0, 4), (4, 0), (-2, 2)):
        with pytest.raises(ValueError, match="no grid"):
            grids.choose(workers, local_size)


@pytest.mark.parametrize("workers, local_size", [(12, 4), (18, 4), (24, 8), (30, 3), (16, 1), (20, 6)])
def test_hops_are_those_counted_on_every_ring_of_the_grid(workers, local_size):
    """Walks all rings from all starts, as rank numbers, and takes the walk that leaves nodes most often."""
    def worst(rings):
        walks = [(ring * 2)[start:start + len(ring)] for ring in rings for start in range(len(ring))]
        left = [sum(a // local_size != b // local_size for a, b in itertools.pairwise(walk)) for walk in walks]
        return max(left)

    for horizontal, vertical in grids.grids(workers):
        rank = [[row * horizontal + column for column in range(horizontal)] for row in range(vertical)]
        row, column = grids.directions(horizontal, vertical, local_size)
        assert (row.between, column.between) == (worst(rank), worst([list(c) for c in zip(*rank, strict=True)]))
        assert row.within + row.between == horizontal - 1
        assert column.within + column.between == vertical - 1
