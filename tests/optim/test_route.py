"""The route: which grid, by what."""
import pytest

from optim import route


def test_native_where_nccl_is_there_and_the_grid_is_that_of_the_nodes():
    native = route.choose("torus", "4x3", 12, 4, nccl=True)
    assert native.by == route.NCCL and native.grid == (4, 3)
    assert route.choose("torus", "auto", 12, 4, nccl=True).by == route.NCCL  # auto has rows that are nodes
    assert route.choose("torus", "6x2", 12, 4, nccl=True).by == route.PROCESS_SETS
    assert route.choose("torus", "4x1", 4, 4, nccl=True).by == route.PROCESS_SETS  # Horovod's needs two nodes
    assert route.choose("torus", "4x3", 12, 4, nccl=False).by == route.PROCESS_SETS
    unknown = route.choose("torus", "4x3", 12, 4, nccl=None)
    assert unknown.by == route.PROCESS_SETS and "NCCL" in unknown.why


def test_elastic_has_no_process_sets_and_chooses_anew():
    assert route.choose("torus", "3x2", 6, 6, elastic=True).by == route.ALL_TO_ALL
    after = route.choose("torus", "3x2", 4, 4, elastic=True)
    assert after.grid == (2, 2) and after.instead and "3x2 does not fit 4 workers" in after.why
    prime = route.choose("torus", "3x2", 5, 5, elastic=True)
    assert prime.allreduce == "ring" and prime.instead and "3x2 does not fit" in prime.why
    assert route.choose("torus", "3x2", 1, 1, elastic=True) == route.ALONE


def test_a_grid_that_is_asked_for_is_taken():
    for grid in ((7, 1), (1, 7)):
        assert route.choose("torus", "{}x{}".format(*grid), 7, 4).grid == grid
    assert not route.choose("torus", "auto", 8, 4).instead
    with pytest.raises(ValueError, match="8x1, 4x2, 2x4, 1x8"):
        route.choose("torus", "3x2", 8, 4)
    with pytest.raises(ValueError, match="65536"):
        route.choose("torus", "auto", 10**6, 4)


@pytest.mark.parametrize("workers, grid", [(1024, (32, 32)), (2048, (64, 32)), (2176, (64, 34)), (3456, (72, 48)),
                                           (4096, (64, 64))])
def test_the_papers_table_4(workers, grid):
    assert route.choose("torus", "auto", workers, 4).grid == grid


@pytest.mark.parametrize("text", ["", "4", "4x", "x4", "0x4", "4x0", "-4x2", "4x2x2", "auto ", "4 x 2", "٣x2"])
def test_what_is_no_grid(text):
    with pytest.raises(ValueError, match="neither auto nor a grid"):
        route.parse_grid(text)
