"""The cost of a gradient exchange: messages and bytes of three all-reduces, in a latency-bandwidth model.

    seconds = slowdown * (hops within nodes * their latency + hops between nodes * theirs)
            + bytes over the slowest link / that link's bandwidth

All three are rings, or rings of rings. A pass around a ring of n ranks takes n - 1 steps, and each step moves a slice
of 1/n of the data to the next rank. A reduce-scatter is one pass, an all-gather is one, and an all-reduce is both. The
latency is counted along the slowest path, so hops within a node cost less than hops between nodes. The transfer is
limited by the ring's slowest link, which all rings that leave a node at the same time share.

Steps, and bytes sent per rank, for S bytes on N ranks, L per node, in a grid of X (horizontal) by Y (vertical):

    ring            2 (N - 1)               2 (N - 1) / N * S
    torus           2 (X - 1) + 2 (Y - 1)   2 (X - 1) / X * S + 2 (Y - 1) / Y * S / X  =  2 (N - 1) / N * S
    hierarchical    the torus whose rows are the nodes: X = L, Y = N / L

The number of bytes is always the same; a grid saves steps (arXiv:1811.05233, section 2.2). That paper counts 2 (X - 1)
steps for the torus and leaves the vertical steps out. It compares with the hierarchical all-reduce of arXiv:1807.11205,
which sends X times more in the vertical step, because one rank of each node holds all S there.
"""
import dataclasses
from dataclasses import dataclass

from distributed import grids

ALLREDUCES = ("ring", "hierarchical", "torus")


@dataclass(frozen=True)
class Link:
    """A network link. latency: seconds per message, whatever its size. bandwidth: bytes per second in one direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Network:
    """Nodes of local_size ranks.

    within: the link of each rank to the other ranks of its node. between: the link of each node to the others.
    slowdown: latency of a message during training, relative to its link's: handling, packing, waiting for late ranks.
    """

    local_size: int
    within: Link
    between: Link
    slowdown: float = 1.0


@dataclass(frozen=True)
class Cost:
    """The cost of one exchange.

    steps: consecutive messages. sent: bytes that each rank sends. latency: seconds that the messages take, whatever
    their size. transfer: seconds that the bytes take.
    """

    steps: int
    sent: float
    latency: float
    transfer: float

    def seconds(self, hidden: float = 0.0) -> float:
        """Returns the seconds that the exchange adds to a step if up to `hidden` seconds of the transfer overlap.

        The latency cannot overlap, because the last gradient has to be exchanged, too.
        """
        return self.latency + max(0.0, self.transfer - hidden)

    def after(self, earlier: "Cost") -> "Cost":
        """Returns the cost of this exchange after an earlier one, which is ready before the backward pass.

        All of the earlier one can overlap, even its latency. But it delays the transfer of this one.
        """
        return dataclasses.replace(self, steps=self.steps + earlier.steps, sent=self.sent + earlier.sent,
                                   transfer=self.transfer + earlier.latency + earlier.transfer)


def grid_of(allreduce: str, workers: int, local_size: int) -> tuple[int, int] | None:
    """Returns (horizontal, vertical) of an all-reduce, or None for hierarchical if the last node is not full.

    ring: (workers, 1). hierarchical: the rows are the nodes. torus: the grid of --torus_grid=auto.
    """
    if allreduce == "ring" or (allreduce == "hierarchical" and workers <= local_size):
        return workers, 1
    if allreduce == "torus":
        return grids.choose(workers, local_size)
    return None if workers % local_size else (local_size, workers // local_size)


def cost(size: float, horizontal: int, vertical: int, network: Network) -> Cost:
    """Returns the cost of an all-reduce of `size` bytes per rank in a grid; a ring is (workers, 1).

    It consists of a reduce-scatter along the rows, an all-reduce along the columns of each rank's 1 / horizontal, and
    an all-gather along the rows.
    """
    row, column = grids.directions(horizontal, vertical, network.local_size)
    row_speed, column_speed = _speeds(horizontal, vertical, network)
    in_row, in_column = (part * size for part in grids.sent(horizontal, vertical))
    once = sum(hops.seconds(network.within.latency, network.between.latency) for hops in (row, column))
    return Cost(steps=2 * (horizontal - 1) + 2 * (vertical - 1), sent=in_row + in_column,
                latency=2 * once * network.slowdown, transfer=in_row / row_speed + in_column / column_speed)


def _speeds(horizontal, vertical, network):
    """Returns bytes per second of the slowest link in any row and in any column, if all of them send at once."""
    speeds = []
    for leaving in grids.leaving(horizontal, vertical, network.local_size):  # these share their node's links
        shared = network.between.bandwidth / leaving if leaving else float("inf")
        speeds.append(shared if leaving == network.local_size else min(network.within.bandwidth, shared))
    return speeds
