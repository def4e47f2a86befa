"""The plan of the all-reduce: which grid, by which backend."""
import pytest

from common.errors import UserError
from distributed.allreduce_plan import ALL_TO_ALL, NCCL, NO_ALLREDUCE, PROCESS_SETS, parse_grid, plan_allreduce


def test_native_where_nccl_is_there_and_the_grid_is_that_of_the_nodes():
    native = plan_allreduce("torus", (4, 3), 12, 4, nccl=True)
    assert native.backend == NCCL and native.grid == (4, 3)
    assert plan_allreduce("torus", None, 12, 4, nccl=True).backend == NCCL  # auto has rows that are nodes
    assert plan_allreduce("torus", (6, 2), 12, 4, nccl=True).backend == PROCESS_SETS
    assert plan_allreduce("torus", (4, 1), 4, 4, nccl=True).backend == PROCESS_SETS  # Horovod's needs two nodes
    assert plan_allreduce("torus", (4, 3), 12, 4, nccl=False).backend == PROCESS_SETS
    unknown = plan_allreduce("torus", (4, 3), 12, 4, nccl=None)
    assert unknown.backend == PROCESS_SETS and "NCCL" in unknown.why


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
