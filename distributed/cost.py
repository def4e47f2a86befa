"""What an exchange of gradients costs: messages and bytes of three all-reduces, in a latency-bandwidth model.

    seconds = slowdown * (hops within nodes * their latency + hops between nodes * theirs)
            + bytes over the slowest link / that link's bandwidth

All three are rings, or rings of rings. In a pass round a ring of n ranks each of the n - 1 steps moves a piece of 1/n
of the data to the next rank; a reduce-scatter is one pass, an all-gather is one, an all-reduce is both. What a step
waits for is counted along the slowest path, so that hops within a node cost less than hops between nodes; what the
bytes wait for is the ring's slowest link, which the rings that leave a node at the same time share.

Steps, and bytes that a rank sends, for S bytes on N ranks, L of them a node, in a grid of X (horizontal) by Y:

    ring            2 (N - 1)               2 (N - 1) / N * S
    torus           2 (X - 1) + 2 (Y - 1)   2 (X - 1) / X * S + 2 (Y - 1) / Y * S / X  =  2 (N - 1) / N * S
    hierarchical    the torus whose rows are the nodes: X = L, Y = N / L

so the number of bytes is always the same, and the number of steps is what a grid saves (arXiv:1811.05233, 2.2, which
counts 2 (X - 1) for the torus, leaving the vertical steps out; the hierarchical all-reduce that it compares with, of
arXiv:1807.11205, sends X times more in the vertical step, because there one rank of each node has all S).
"""
from dataclasses import dataclass

from distributed import grids

ALLREDUCES = ("ring", "hierarchical", "torus")


@dataclass(frozen=True)
class Link:
    """latency: seconds before a message's bytes count; bandwidth: bytes per second in one direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Network:
    """Nodes of local_size ranks. within: what each rank has to the others of its node; between: what a node has.

    slowdown: how many times its link's latency a message costs in a training: handling, packs, waiting for late ranks.
    """

    local_size: int
    within: Link
    between: Link
    slowdown: float = 1.0


@dataclass(frozen=True)
class Cost:
    """latency: seconds that messages take whatever they hold; transfer: seconds that bytes take; steps: messages in a
    row; sent: bytes that each rank sends."""

    steps: int
    sent: float
    latency: float
    transfer: float

    def seconds(self, hidden: float = 0.0) -> float:
        """What is added to a step where `hidden` seconds of something else go on beside the transfer.

        The latency adds to it all the same: the last gradient has to go round, too.
        """
        return self.latency + max(0.0, self.transfer - hidden)


def grid_of(allreduce: str, workers: int, local_size: int) -> tuple[int, int] | None:
    """The (horizontal, vertical) that an all-reduce has; None for hierarchical where the last node is not full.

    ring: (workers, 1). hierarchical: its rows are the nodes. torus: what --torus_grid=auto takes.
    """
    if allreduce == "ring" or (allreduce == "hierarchical" and workers <= local_size):
        return workers, 1
    if allreduce == "torus":
        return grids.choose(workers, local_size)
    return None if workers % local_size else (local_size, workers // local_size)


def cost(size: float, horizontal: int, vertical: int, network: Network) -> Cost:
    """Of an all-reduce of `size` bytes on every rank in a grid; a ring is (workers, 1).

    A reduce-scatter along the rows, an all-reduce of the 1 / horizontal that each rank then has along the columns, an
    all-gather along the rows.
    """
    row, column = grids.directions(horizontal, vertical, network.local_size)
    row_speed, column_speed = _speeds(horizontal, vertical, network)
    in_row, in_column = (part * size for part in grids.sent(horizontal, vertical))
    once = sum(hops.seconds(network.within.latency, network.between.latency) for hops in (row, column))
    return Cost(steps=2 * (horizontal - 1) + 2 * (vertical - 1), sent=in_row + in_column,
                latency=2 * once * network.slowdown, transfer=in_row / row_speed + in_column / column_speed)


def _speeds(horizontal, vertical, network):
    """Bytes per second along the slowest link of any row, and of any column, when all rows, or columns, are at it."""
    speeds = []
    for leaving in grids.leaving(horizontal, vertical, network.local_size):  # these share their node's links
        shared = network.between.bandwidth / leaving if leaving else float("inf")
        speeds.append(shared if leaving == network.local_size else min(network.within.bandwidth, shared))
    return speeds
