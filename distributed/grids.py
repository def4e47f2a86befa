"""Grids for the 2D torus of arXiv:1811.05233, section 2.2: which there are, and which to take. Plain Python.

Ranks fill a grid row by row, and nodes hold consecutive ranks: rank = row * horizontal + column, node = rank //
local_size. The reduce-scatter and the all-gather run along rows, over `horizontal` neighbouring ranks; the all-reduce
runs along columns, over `vertical` ranks that lie `horizontal` apart.
"""
from collections import Counter
from dataclasses import dataclass
from functools import cache

# What a message takes to the next rank, in seconds, before its bytes count: the entries for a ring (Simple protocol)
# over NVLink and over a network in NCCL's own table of latencies (hwLat in src/graph/tuning.cc, versions 2.5 to 2.8).
NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 9.6e-6


@dataclass(frozen=True)
class Hops:
    """Messages that follow one another: how many go to a rank of the same node, how many to another node's."""

    within: int
    between: int

    def seconds(self, within: float, between: float) -> float:
        """With the seconds that a message of each kind takes."""
        return self.within * within + self.between * between


def grids(workers: int) -> list[tuple[int, int]]:
    """All (horizontal, vertical) with horizontal * vertical = workers, the widest first: (workers, 1) is a ring."""
    return [(width, workers // width) for width in range(workers, 0, -1) if workers % width == 0]


def choose(workers: int, local_size: int) -> tuple[int, int]:
    """The (horizontal, vertical) of the grid that messages pass in the least time, by NCCL's latencies.

    workers: ranks in all; local_size: ranks on each node. Of the hops along a row only one in local_size leaves a node,
    of those along a column each does; so with several ranks a node rows come out longer than columns. A prime number of
    workers gives (workers, 1), the ring. Of equally fast grids, the one that has a node send the fewest bytes: on large
    clusters they all send nearly the same, but on 4 nodes of 2 ranks, (4, 2) a third more than (2, 4).

    With 4 GPUs a node these are the grids of the paper's table 4; they would be with any ratio of the two latencies
    between 1.5 and 3. Raises ValueError unless both numbers are positive.
    """
    if workers < 1 or local_size < 1:
        raise ValueError(f"there is no grid of {workers} workers, {local_size} on a node")
    seconds = {grid: round(sum(hops.seconds(NVLINK_LATENCY, NETWORK_LATENCY)
                               for hops in directions(*grid, local_size)), 12) for grid in grids(workers)}
    least = min(seconds.values())
    fastest = [grid for grid, taken in seconds.items() if taken == least]  # rounded: ties are ties
    return min(fastest, key=lambda grid: sent_by_node(*grid, local_size))


def sent_by_node(horizontal: int, vertical: int, local_size: int) -> float:
    """What leaves the busiest node in an exchange, in parts of the size of the gradients."""
    return sum(part * ranks for part, ranks in zip(
        sent(horizontal, vertical), leaving(horizontal, vertical, local_size), strict=True))


def sent(horizontal: int, vertical: int) -> tuple[float, float]:
    """What each rank sends in an exchange along its row and along its column, in parts of the size of the gradients."""
    return 2 * (horizontal - 1) / horizontal, 2 * (vertical - 1) / vertical / horizontal


@cache
def leaving(horizontal: int, vertical: int, local_size: int) -> tuple[int, int]:
    """How many of the busiest node's ranks have their neighbour along the row on another node; and along the column."""
    workers = horizontal * vertical

    def most(neighbour):
        nodes = (rank // local_size for rank in range(workers) if neighbour(rank) // local_size != rank // local_size)
        return max(Counter(nodes).values(), default=0)

    return (most(lambda rank: rank // horizontal * horizontal + (rank + 1) % horizontal),
            most(lambda rank: (rank + horizontal) % workers))


def directions(horizontal: int, vertical: int, local_size: int) -> tuple[Hops, Hops]:
    """The hops of one pass along a row and of one along a column; each of the slowest row, or column, that there is."""
    # How a ring lies across nodes depends on its first rank's place in its node alone: local_size of them are all.
    rows = [ring(row * horizontal, 1, horizontal, local_size) for row in range(min(vertical, local_size))]
    columns = [ring(column, horizontal, vertical, local_size) for column in range(min(horizontal, local_size))]
    return tuple(max(rings, key=lambda hops: hops.between) for rings in (rows, columns))


def ring(first: int, stride: int, length: int, local_size: int) -> Hops:
    """The length - 1 hops of a pass around the ring of ranks first, first + stride, …, from the worst starting rank.

    A pass leaves out one hop of the ring's `length`; the worst leaves out a cheap one, where there is one.
    """
    if length == 1:
        return Hops(0, 0)
    nodes = [(first + place * stride) // local_size for place in range(length)]
    between = sum(node != nodes[place - 1] for place, node in enumerate(nodes))
    return Hops(max(0, length - between - 1), min(between, length - 1))
