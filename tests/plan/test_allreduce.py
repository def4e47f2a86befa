"""The plan of the all-reduce: which grid, by which backend."""
import pytest

from common.errors import UserError
from plan.allreduce import (
    ALL_TO_ALL,
    NCCL,
    NCCL_AND_MPI,
    NO_ALLREDUCE,
    PROCESS_SETS,
    check_nodes,
    parse_grid,
    plan_allreduce,
)


def test_native_where_nccl_is_there_and_the_grid_is_that_of_the_nodes():
    native = plan_allreduce("torus", (4, 3), 12, 4, nccl=True)
    assert native.backend == NCCL and native.grid == (4, 3)
    assert plan_allreduce("torus", None, 12, 4, nccl=True).backend == NCCL  # auto has rows that are nodes
    assert plan_allreduce("torus", (6, 2), 12, 4, nccl=True).backend == PROCESS_SETS
    assert plan_allreduce("torus", (4, 1), 4, 4, nccl=True).backend == PROCESS_SETS  # Horovod's needs two nodes
    assert plan_allreduce("torus", (4, 3), 12, 4, nccl=False).backend == PROCESS_SETS
    unknown = plan_allreduce("torus", (4, 3), 12, 4, nccl=None)
    assert unknown.backend == PROCESS_SETS and "NCCL" in unknown.why


def test_hierarchical_has_a_master_on_each_node():
    plan = plan_allreduce("hierarchical", None, 12, 4)
    assert (plan.allreduce, plan.grid, plan.backend, plan.is_fallback) == ("hierarchical", (4, 3), PROCESS_SETS, False)
    assert "3 nodes of 4 workers" in plan.why
    for workers, local_size, where in ((4, 4, "one node"), (3, 4, "one node"), (4, 1, "4 nodes of one worker")):
        ring = plan_allreduce("hierarchical", None, workers, local_size)
        assert (ring.allreduce, ring.is_fallback) == ("ring", True) and where in ring.why
    assert plan_allreduce("hierarchical", None, 1, 1) == NO_ALLREDUCE
    with pytest.raises(UserError, match="needs full nodes, but 10 workers are not a multiple of 4 per node"):
        plan_allreduce("hierarchical", None, 10, 4)


def test_hierarchical_is_horovods_own_on_nccl_and_mpi(monkeypatch):
    monkeypatch.delenv("HOROVOD_CONTROLLER", raising=False)
    assert plan_allreduce("hierarchical", None, 12, 4, nccl=True).backend == NCCL_AND_MPI
    unknown = plan_allreduce("hierarchical", None, 12, 4, nccl=None)
    assert unknown.backend == PROCESS_SETS and "NCCL and MPI" in unknown.why
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")  # as horovodrun --gloo does: Horovod would use a ring
    assert plan_allreduce("hierarchical", None, 12, 4, nccl=True).backend == PROCESS_SETS


@pytest.mark.parametrize("rank, local_rank, local_size, nodes, fits", [
    (3, 1, 2, 2, True), (2, 0, 3, 2, False), (3, 0, 1, 2, False),  # the last two: 3 + 1 workers
    (1, 0, 2, 2, False)])  # ranks 0 and 2 are on one node
def test_hierarchical_needs_equal_nodes_of_consecutive_ranks(rank, local_rank, local_size, nodes, fits, monkeypatch):
    for name, value in (("RANK", rank), ("SIZE", 4), ("LOCAL_RANK", local_rank), ("LOCAL_SIZE", local_size),
                        ("CROSS_SIZE", nodes)):
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    monkeypatch.delenv("BIGBATCH_WORLD_SIZE", raising=False)
    check_nodes("ring", None)
    check_nodes("torus", (4, 1))
    if fits:
        check_nodes("hierarchical", None)
    else:
        with pytest.raises(UserError, match="hierarchical needs the same number of workers, with consecutive ranks"):
            check_nodes("hierarchical", None)


def test_elastic_has_no_process_sets_and_chooses_anew():
    assert plan_allreduce("torus", (3, 2), 6, 6, elastic=True).backend == ALL_TO_ALL
    after = plan_allreduce("torus", (3, 2), 4, 4, elastic=True)
    assert after.grid == (2, 2) and after.is_fallback and "3x2 does not fit 4 workers" in after.why
    prime = plan_allreduce("torus", (3, 2), 5, 5, elastic=True)
    assert prime.allreduce == "ring" and prime.is_fallback and "3x2 does not fit" in prime.why
    assert plan_allreduce("torus", (3, 2), 1, 1, elastic=True) == NO_ALLREDUCE


def test_a_grid_that_is_asked_for_is_taken():
    for grid in ((7, 1), (1, 7)):
        assert plan_allreduce("torus", grid, 7, 4).grid == grid
    assert not plan_allreduce("torus", None, 8, 4).is_fallback
    with pytest.raises(UserError, match="8x1, 4x2, 2x4, 1x8"):
        plan_allreduce("torus", (3, 2), 8, 4)
    with pytest.raises(UserError, match="65536"):
        plan_allreduce("torus", None, 10**6, 4)


@pytest.mark.parametrize("workers, grid", [(1024, (32, 32)), (2048, (64, 32)), (2176, (64, 34)), (3456, (72, 48)),
                                           (4096, (64, 64))])
def test_the_papers_table_4(workers, grid):
    assert plan_allreduce("torus", None, workers, 4).grid == grid


@pytest.mark.parametrize("text", ["", "4", "4x", "x4", "0x4", "4x0", "-4x2", "4x2x2", "auto ", "4 x 2", "٣x2"])
def test_what_is_no_grid(text):
    with pytest.raises(ValueError, match="neither auto nor a grid"):
        parse_grid(text)
