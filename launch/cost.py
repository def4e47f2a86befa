"""The cost of a gradient exchange: messages and bytes of three all-reduces, in a latency-bandwidth model.

    seconds = slowdown * (hops within nodes * their latency + hops between nodes * theirs)
            + bytes over the slowest link / that link's bandwidth

Ring and torus are rings, or rings of rings. A pass around a ring of n ranks takes n - 1 steps, and each step moves a
slice of 1/n of the data to the next rank. A reduce-scatter is one pass, an all-gather is one, and an all-reduce is
both. The latency is counted along the slowest path, so hops within a node cost less than hops between nodes. The
transfer is limited by the ring's slowest link, which all rings that leave a node at the same time share.

In the hierarchical all-reduce of arXiv:1807.11205, the sum of a node passes along a chain of its ranks to its master,
the masters form a ring, and their sum passes back along the chain. All S bytes go over each link of a chain, in slices
that follow each other. Between nodes, the master uses the whole link of its node, unless its own is slower.

Steps, and bytes that the busiest rank sends, for S bytes on N ranks, L per node, Y nodes, or in a grid of X
(horizontal) by Y (vertical):

    ring            2 (N - 1)               2 (N - 1) / N * S
    torus           2 (X - 1) + 2 (Y - 1)   2 (X - 1) / X * S + 2 (Y - 1) / Y * S / X  =  2 (N - 1) / N * S
    hierarchical    2 (L - 1) + 2 (Y - 1)   S + 2 (Y - 1) / Y * S, by a master

A torus sends as many bytes as a ring and saves steps (arXiv:1811.05233, section 2.2). That paper counts 2 (X - 1) steps
for the torus and leaves the vertical steps out. As it says, hierarchical has the steps of the torus whose rows are the
nodes, and each rank of its vertical step sends X times as much. But only one rank of a node does, so the node sends the
same.
"""
import dataclasses
from dataclasses import dataclass

from plan import grids


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

    steps: consecutive messages. sent: bytes that the busiest rank sends. latency: seconds that the messages take,
    whatever their size. transfer: seconds that the bytes take.
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

    ring: (workers, 1), as hierarchical in training on one node, or on nodes of one worker. hierarchical: the rows are
    the nodes. torus: the grid of --torus_grid=auto.
    """
    if allreduce == "ring" or (allreduce == "hierarchical" and (workers <= local_size or local_size == 1)):
        return workers, 1
    if allreduce == "torus":
        return grids.choose(workers, local_size)
    return None if workers % local_size else (local_size, workers // local_size)


def cost(size: float, horizontal: int, vertical: int, network: Network, allreduce: str = "torus") -> Cost:
    """Returns the cost of an all-reduce of `size` bytes per rank in a grid; a ring is (workers, 1).

    A torus consists of a reduce-scatter along the rows, an all-reduce along the columns of each rank's 1 / horizontal,
    and an all-gather along the rows. hierarchical: the rows are the nodes. In a single row or column it is a ring.
    """
    row, column = grids.directions(horizontal, vertical, network.local_size)
    masters = allreduce == "hierarchical" and 1 not in (horizontal, vertical)
    sent, transfer = (_masters if masters else _rings)(size, horizontal, vertical, network)
    once = sum(hops.seconds(network.within.latency, network.between.latency) for hops in (row, column))
    return Cost(steps=2 * (horizontal - 1) + 2 * (vertical - 1), sent=sent, latency=2 * once * network.slowdown,
                transfer=transfer)


def _rings(size, horizontal, vertical, network):
    """Returns bytes that each rank sends, and the seconds of their transfer."""
    in_row, in_column = (part * size for part in grids.sent(horizontal, vertical))
    row_speed, column_speed = _speeds(horizontal, vertical, network)
    return in_row + in_column, in_row / row_speed + in_column / column_speed


def _masters(size, horizontal, vertical, network):
    """Returns bytes that a master sends, and the seconds of the transfer up, between the masters, and down."""
    between = grids.sent(vertical, 1)[0] * size
    return size + between, (2 * size / network.within.bandwidth
                            + between / min(network.within.bandwidth, network.between.bandwidth))


def _speeds(horizontal, vertical, network):
    """Returns bytes per second of the slowest link in any row and in any column, if all of them send at once."""
    speeds = []
    for leaving in grids.leaving(horizontal, vertical, network.local_size):  # these share their node's links
        shared = network.between.bandwidth / leaving if leaving else float("inf")
        speeds.append(shared if leaving == network.local_size else min(network.within.bandwidth, shared))
    return speeds
