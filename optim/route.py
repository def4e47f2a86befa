"""The route of gradients from worker to worker: ring or torus, on which grid, by what, and why. Plain Python."""
import re
from dataclasses import dataclass

from optim import grids

ALLREDUCES = ("ring", "torus")
HOROVOD, NCCL = "Horovod's all-reduce", "Horovod's own torus, on NCCL"
PROCESS_SETS, ALL_TO_ALL = "Horovod process sets", "all-to-alls of all workers"
MOST_WORKERS = 65_536  # for which a grid is looked for


@dataclass(frozen=True)
class Route:
    """plan.json's `exchange`. allreduce: none, ring or torus. grid: (horizontal, vertical) of a torus.

    instead: it is another than the one that was asked for; `why` says why.
    """

    allreduce: str
    grid: tuple[int, int] | None
    by: str | None
    why: str
    instead: bool = False

    def as_json(self) -> dict:
        return {"allreduce": self.allreduce, "grid": self.grid and list(self.grid), "by": self.by, "why": self.why}


RING = Route("ring", None, HOROVOD, "--allreduce=ring")
ALONE = Route("none", None, None, "one worker has nothing to exchange")


def parse_grid(text: str) -> tuple[int, int] | None:
    """(horizontal, vertical) of 4x2; None of auto. Raises ValueError."""
    if text == "auto":
        return None
    if not re.fullmatch("[1-9][0-9]{0,8}x[1-9][0-9]{0,8}", text):
        raise ValueError(f"'{text}' is neither auto nor a grid such as 4x2")
    horizontal, vertical = map(int, text.split("x"))
    return horizontal, vertical


def choose(allreduce: str, torus_grid: str, workers: int, local_size: int, elastic: bool = False,
           nccl: bool | None = False) -> Route:
    """The route for --allreduce and --torus_grid on so many workers, `local_size` on each node.

    elastic: workers may come and go. Then a grid that was asked for and does not fit those that there are gives way to
    auto, and process sets are ruled out: when a worker is lost, Horovod 0.28 has those that are left agree with it on
    taking the sets down, which ends them, too.

    nccl: whether Horovod exchanges by NCCL, on GPUs; None if that is not known yet. Its own torus always has the grid
    of local x cross ranks.

    Raises ValueError, with the grids that fit, where the one that was asked for does not.
    """
    asked = parse_grid(torus_grid)
    if workers == 1:
        return ALONE
    if allreduce == "ring":
        return RING
    if workers > MOST_WORKERS:
        raise ValueError(f"--allreduce=torus is for {MOST_WORKERS} workers at most, not {workers}")
    misfit = ""
    if asked and asked[0] * asked[1] != workers:
        if not elastic:
            fitting = ", ".join(f"{x}x{y}" for x, y in grids.grids(workers))
            raise ValueError(f"--torus_grid={torus_grid} does not fit {workers} workers; grids that do: {fitting}")
        asked, misfit = None, f"{torus_grid} does not fit {workers} workers; "
    grid = asked or grids.choose(workers, local_size)
    if not asked and 1 in grid:
        return Route("ring", None, HOROVOD, f"{misfit}{workers} workers, a prime number, have no grid but a ring", True)
    horizontal, vertical = grid
    if asked:
        why = f"--torus_grid={torus_grid}"
    else:
        why = (f"{misfit}auto, for {local_size} worker{'s' * (local_size > 1)} a node: messages go the way of "
               f"{horizontal - 1} + {vertical - 1} hops, in a ring of {workers - 1}, and no other grid takes less time")
    by = ALL_TO_ALL if elastic else PROCESS_SETS
    if grid == (local_size, workers // local_size) and vertical > 1 and not elastic and nccl is not False:
        why += "" if nccl else "; where Horovod is built with NCCL and sees GPUs, by its own torus"
        by = NCCL if nccl else by
    return Route("torus", grid, by, why, bool(misfit))
