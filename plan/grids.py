"""Lists and chooses grids for the 2D torus of arXiv:1811.05233, section 2.2. Plain Python.

Ranks fill a grid row by row, and nodes hold consecutive ranks: rank = row * horizontal + column, node = rank //
local_size. The reduce-scatter and the all-gather run along rows, over `horizontal` consecutive ranks. The all-reduce
runs along columns, over `vertical` ranks with a stride of `horizontal`.
"""
from collections import Counter
from dataclasses import dataclass
from functools import cache

# Latency of a message to the next rank, in seconds. NCCL's own table has these entries for a ring (Simple protocol)
# over NVLink and over a network (hwLat in src/graph/tuning.cc, versions 2.5 to 2.8).
NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 9.6e-6


@dataclass(frozen=True)
class Hops:
    """Consecutive messages: the number to ranks of the same node, and the number to ranks of other nodes."""

    within: int
    between: int

    def seconds(self, within: float, between: float) -> float:
        """Returns the total time, from the seconds of a message of each kind."""
        return self.within * within + self.between * between


def grids(workers: int) -> list[tuple[int, int]]:
    """Returns all (horizontal, vertical) with horizontal * vertical = workers, widest first: (workers, 1) is a ring."""
    return [(width, workers // width) for width in range(workers, 0, -1) if workers % width == 0]


def choose(workers: int, local_size: int) -> tuple[int, int]:
    """Returns (horizontal, vertical) of the grid with the lowest total latency, by NCCL's latencies.

    workers: number of ranks. local_size: ranks per node. Only one hop in local_size along a row leaves a node, but each
    hop along a column does. With several ranks per node, rows are therefore longer than columns. A prime number of
    workers gives (workers, 1), the ring. Among equally fast grids, the function takes the one whose nodes send the
    fewest bytes. On large clusters all send nearly the same; on 4 nodes of 2 ranks, (4, 2) sends a third more than
    (2, 4).

    With 4 GPUs per node, these are the grids of the paper's table 4. Any ratio of the two latencies between 1.5 and 3
    gives the same grids. Raises ValueError unless both numbers are positive.
    """
    if workers < 1 or local_size < 1:
        raise ValueError(f"there is no grid of {workers} workers with {local_size} per node")
    seconds = {grid: round(sum(hops.seconds(NVLINK_LATENCY, NETWORK_LATENCY)
                               for hops in directions(*grid, local_size)), 12) for grid in grids(workers)}
    least = min(seconds.values())
    fastest = [grid for grid, taken in seconds.items() if taken == least]  # rounded, so that equal times compare equal
    return min(fastest, key=lambda grid: sent_by_node(*grid, local_size))


def sent_by_node(horizontal: int, vertical: int, local_size: int) -> float:
    """Returns what leaves the busiest node in an exchange, as a multiple of the size of the gradients."""
    return sum(part * ranks for part, ranks in zip(
        sent(horizontal, vertical), leaving(horizontal, vertical, local_size), strict=True))


def sent(horizontal: int, vertical: int) -> tuple[float, float]:
    """Returns what each rank sends along its row and along its column, as multiples of the size of the gradients."""
    return 2 * (horizontal - 1) / horizontal, 2 * (vertical - 1) / vertical / horizontal


@cache
def leaving(horizontal: int, vertical: int, local_size: int) -> tuple[int, int]:
    """Returns how many ranks of the busiest node send along their row, and along their column, to another node."""
    workers = horizontal * vertical

    def most(receiver):
        nodes = (rank // local_size for rank in range(workers) if receiver(rank) // local_size != rank // local_size)
        return max(Counter(nodes).values(), default=0)

    return (most(lambda rank: rank // horizontal * horizontal + (rank + 1) % horizontal),
            most(lambda rank: (rank + horizontal) % workers))


def directions(horizontal: int, vertical: int, local_size: int) -> tuple[Hops, Hops]:
    """Returns the hops of one pass along the slowest row, and of one along the slowest column."""
    # The layout of a ring across nodes depends only on its first rank's index in its node: local_size rings are enough.
    rows = [ring(row * horizontal, 1, horizontal, local_size) for row in range(min(vertical, local_size))]
    columns = [ring(column, horizontal, vertical, local_size) for column in range(min(horizontal, local_size))]
    return tuple(max(rings, key=lambda hops: hops.between) for rings in (rows, columns))


def ring(first: int, stride: int, length: int, local_size: int) -> Hops:
    """Returns the length - 1 hops of a pass around the ring of ranks first, first + stride, …, from the worst start.

    A pass omits one hop of the ring's `length`. The worst pass omits a cheap one, if there is one.
    """
    if length == 1:
        return Hops(0, 0)
    nodes = [(first + index * stride) // local_size for index in range(length)]
    between = sum(node != nodes[index - 1] for index, node in enumerate(nodes))
    return Hops(max(0, length - between - 1), min(between, length - 1))
