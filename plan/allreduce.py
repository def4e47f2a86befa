"""Chooses the all-reduce of the gradients (ring, torus, hierarchical), its grid and backend. Plain Python."""
import re
from dataclasses import dataclass

from common import launcher
from common.errors import UserError, plural
from plan import grids

ALLREDUCES = ("ring", "torus", "hierarchical")
HOROVOD, NCCL = "Horovod's all-reduce", "Horovod's own torus, on NCCL"
NCCL_AND_MPI = "Horovod's own hierarchical all-reduce, on NCCL and MPI"
PROCESS_SETS, ALL_TO_ALL = "Horovod process sets", "all-to-alls among all workers"
MOST_WORKERS = 65_536  # the largest number for which a grid is searched


@dataclass(frozen=True)
class AllreducePlan:
    """How gradients are exchanged. `as_json` is the `exchange` entry of plan.json."""

    allreduce: str  # none, ring, torus or hierarchical
    grid: tuple[int, int] | None  # (horizontal, vertical) of a torus; (workers per node, nodes) of a hierarchical one
    backend: str | None  # what carries it out
    why: str  # reason for the grid, or for the fallback
    is_fallback: bool = False  # whether the plan differs from the requested one

    def as_json(self) -> dict:
        return {"allreduce": self.allreduce, "grid": self.grid and list(self.grid), "by": self.backend,
                "why": self.why}


RING = AllreducePlan("ring", None, HOROVOD, "--allreduce=ring")
NO_ALLREDUCE = AllreducePlan("none", None, None, "one worker has nothing to exchange")


def parse_grid(text: str) -> tuple[int, int] | None:
    """Parses 4x2 into (horizontal, vertical), and auto into None. Raises ValueError."""
    if text == "auto":
        return None
    if not re.fullmatch("[1-9][0-9]{0,8}x[1-9][0-9]{0,8}", text):
        raise ValueError(f"'{text}' is neither auto nor a grid such as 4x2")
    horizontal, vertical = map(int, text.split("x"))
    return horizontal, vertical


def plan_allreduce(allreduce: str, torus_grid: tuple[int, int] | None, workers: int, local_size: int,
                   elastic: bool = False, nccl: bool | None = False) -> AllreducePlan:
    """Returns the plan for --allreduce and --torus_grid on `workers` workers, `local_size` on each node.

    torus_grid: the requested grid, or None for auto. elastic: whether workers may come and go. If so, auto replaces a
    grid that does not fit the current workers, and process sets are ruled out: when a worker is lost, Horovod 0.28
    makes the remaining ones agree with it on removing the sets, which ends them, too. nccl: whether Horovod exchanges
    by NCCL, on GPUs; None if that is not known yet. Horovod's own torus always has the grid of local x cross ranks.

    Raises UserError, with the grids that fit, if the requested one does not, or if nodes are not full for hierarchical.
    """
    if workers == 1:
        return NO_ALLREDUCE
    if allreduce == "hierarchical":
        return _hierarchical(workers, local_size, nccl)
    return RING if allreduce == "ring" else _torus(torus_grid, workers, local_size, elastic, nccl)


def _torus(asked: tuple[int, int] | None, workers: int, local_size: int, elastic: bool, nccl: bool | None
           ) -> AllreducePlan:
    if workers > MOST_WORKERS:
        raise UserError(f"--allreduce=torus supports at most {MOST_WORKERS} workers, not {workers}; use "
                        "--allreduce=ring")
    fits = asked is None or asked[0] * asked[1] == workers
    if not fits and not elastic:
        fitting = ", ".join(f"{x}x{y}" for x, y in grids.grids(workers))
        raise UserError(f"--torus_grid={_text(asked)} does not fit {workers} workers; grids that fit: {fitting}")
    misfit = "" if fits else f"{_text(asked)} does not fit {workers} workers; "
    if asked and fits:
        grid, why = asked, f"--torus_grid={_text(asked)}"
    else:
        grid = grids.choose(workers, local_size)
        if 1 in grid:
            why = f"{misfit}{workers} workers can only form a ring, because {workers} is prime"
            return AllreducePlan("ring", None, HOROVOD, why, is_fallback=True)
        why = misfit + _why(*grid, local_size)
    backend, remark = _torus_backend(grid, workers, local_size, elastic, nccl)
    return AllreducePlan("torus", grid, backend, why + remark, is_fallback=not fits)


def _torus_backend(grid, workers, local_size, elastic, nccl) -> tuple[str, str]:
    """Returns what carries out a torus, and a remark if that depends on how Horovod is built."""
    if elastic:
        return ALL_TO_ALL, ""
    is_grid_of_nodes = grid == (local_size, workers // local_size) and grid[1] > 1
    if not is_grid_of_nodes or nccl is False:
        return PROCESS_SETS, ""
    if nccl:
        return NCCL, ""
    return PROCESS_SETS, "; if Horovod is built with NCCL and sees GPUs, it uses its own torus"


def _text(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"


def _hierarchical(workers, local_size, nccl) -> AllreducePlan:
    """Horovod's own needs MPI between the nodes. Without MPI, Horovod would ignore the setting and use a ring."""
    if workers > local_size and workers % local_size:
        raise UserError(f"--allreduce=hierarchical needs full nodes, but {workers} workers are not a multiple of "
                        f"{local_size} per node; start a multiple, or use --allreduce=torus or ring")
    nodes = workers // local_size
    if nodes < 2 or local_size == 1:
        where = "one node" if nodes < 2 else f"{nodes} nodes of one worker"
        return AllreducePlan("ring", None, HOROVOD, f"{workers} workers on {where} can only form a ring",
                             is_fallback=True)
    why = f"--allreduce=hierarchical, {nodes} nodes of {local_size} workers"
    if nccl and not launcher.uses_gloo():
        return AllreducePlan("hierarchical", (local_size, nodes), NCCL_AND_MPI, why)
    if nccl is None:
        why += "; if Horovod is built with NCCL and MPI and sees GPUs, it uses its own"
    return AllreducePlan("hierarchical", (local_size, nodes), PROCESS_SETS, why)


def _why(horizontal, vertical, local_size) -> str:
    return (f"auto, for {plural(local_size, 'worker')} per node: a message takes {horizontal - 1} + "
            f"{vertical - 1} hops instead of the ring's {horizontal * vertical - 1}, and no other grid is faster")


def check_nodes(allreduce: str, torus_grid: tuple[int, int] | None) -> None:
    """Raises UserError on at least one worker if the all-reduce needs equal nodes, and they are not.

    Each worker would choose a grid for its own node. Horovod needs the process sets before workers can communicate, so
    it would exit without an explanation. Hierarchical also needs consecutive ranks on each node.
    """
    if allreduce == "torus" and not torus_grid and launcher.nodes_differ():
        raise UserError("--torus_grid=auto needs the same number of workers on each node; give a grid, such as "
                        "--torus_grid=4x2")
    if allreduce == "hierarchical" and (launcher.nodes_differ() or launcher.ranks_scattered()):
        raise UserError("--allreduce=hierarchical needs the same number of workers, with consecutive ranks, on each "
                        "node; start them so, or use --allreduce=torus --torus_grid=4x2 or --allreduce=ring")
