"""The model of a cluster for a forecast: its network, the speed of its GPUs, and the time of a training step.

    step = accumulation * compute + latency of the exchange + messages that the backward pass does not hide
    compute = fixed + images * per image

`fixed` is the time of a micro-batch that does not depend on its images (launching kernels, updating weights). A
topology has both for ResNet-50, and perhaps for models whose speed was measured. For another model, `fixed` follows
from its number of variables and the time per image from its multiply-adds, relative to ResNet-50's.
The backward pass is two thirds of compute. The fraction `overlap` of the last micro-batch's backward pass can hide the
transfer. The latency cannot be hidden: the last gradient has to be exchanged, too, and all ranks wait for the last one.
A recipe's steps also send a message with the loss and batch norm's moving statistics. It goes before the gradients,
because it is ready after the forward pass.

A topology is a JSON file like those in launch/topologies. benchmarks/calibrate.py computes its `slowdown` and `compute`
from published rates, which its `calibration` lists, and `sources` says where each figure comes from. `compute` is the
speed in `precision`, and `float32` that in float32, if the former is another. `memory` is that of a GPU in GiB, which
decides on the micro-batch.

The cost of an exchange, which is an all-reduce, in a latency-bandwidth model:

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
import json
import math
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.flags import say_what_is_hidden
from model_zoo.cost import RESNET50, ModelCost
from plan import grids
from plan.plan import Phase
from plan.settings import Recipe

FOLDER = Path(__file__).parent / "topologies"
BYTES = {"none": 4, "fp16": 2}  # --compression -> bytes of a gradient
RESULTS = 5  # numbers that a step sums besides gradients and statistics: two signals, loss, hits and samples
BACKWARD = 2 / 3  # of compute: gradients of the inputs and of the weights, each as expensive as the forward pass


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
    """Returns the bandwidth (bytes per second) of the slowest link of a row and of a column, if all rings send at once.
    """
    speeds = []
    for leaving in grids.leaving(horizontal, vertical, network.local_size):  # these share their node's links
        shared = network.between.bandwidth / leaving if leaving else float("inf")
        speeds.append(shared if leaving == network.local_size else min(network.within.bandwidth, shared))
    return speeds


@dataclass(frozen=True)
class StepWork:
    """The work of one worker in a step: accumulation_steps micro-batches, then an exchange of `bytes` of gradients.

    results: bytes of the message with loss and statistics; 0: none is sent. freeze: whether the last layer alone is
    trained, so that a micro-batch is little more than a forward pass.
    """

    model: ModelCost
    micro_batch_size: int
    bytes: float
    accumulation_steps: int = 1
    results: float = 0.0
    freeze: bool = False

    @classmethod
    def of(cls, model: ModelCost, phase: Phase, recipe: Recipe, bytes_per_gradient: int) -> "StepWork":
        """Returns the work of a step in Bigbatch, which averages batch norm's statistics if they move."""
        moving = recipe.batch_norm_statistics == "moving" and not recipe.freeze
        return cls(model, phase.micro_batch_size, model.trained(recipe.freeze) * bytes_per_gradient,
                   phase.accumulation_steps, 4 * (RESULTS + moving * model.statistics), recipe.freeze)


@dataclass(frozen=True)
class Compute:
    """Seconds of the forward and backward pass on one GPU: of a micro-batch, whatever its size, and of each image."""

    fixed: float
    per_image: float


@dataclass(frozen=True)
class Topology:
    """A cluster. cluster: what it is, in words. overlap: a fraction between 0 and 1. compute: model -> its times.

    precision: that of `compute`, or None if it is unknown. source: where its rates are from. memory: of a GPU in GiB,
    or None. float32: the cluster with its times in float32, if `compute` has others.
    """

    cluster: str
    network: Network
    overlap: float
    compute: dict[str, Compute]
    precision: str | None = None
    source: str = ""
    memory: float | None = None
    float32: "Topology | None" = None

    def in_precision(self, precision: str | None) -> "Topology":
        """Returns the cluster with its times in a --precision, or with those that are known."""
        return self.float32 if precision == "float32" and self.float32 else self

    def step_seconds(self, work: StepWork, grid: tuple[int, int], allreduce: str = "torus") -> float:
        """Returns the time from one update to the next, on horizontal * vertical workers. See `cost`."""
        exchange = cost(work.bytes, *grid, self.network, allreduce)
        if work.results:
            exchange = exchange.after(cost(work.results, *grid, self.network, allreduce))
        return work.accumulation_steps * self.compute_seconds(work) + exchange.seconds(self.hidden(work))

    def compute_of(self, model: ModelCost) -> Compute:
        """Returns the times of a model: its own if the topology has them, otherwise ResNet-50's, scaled."""
        resnet50 = self.compute["resnet50"]
        return self.compute.get(model.name) or Compute(
            resnet50.fixed * model.variables / RESNET50.variables,
            resnet50.per_image * model.multiply_adds / RESNET50.multiply_adds)

    def compute_seconds(self, work: StepWork) -> float:
        """Returns the time of one micro-batch: of its forward and backward pass, or with --freeze of the former alone.
        """
        compute = self.compute_of(work.model)
        both = compute.fixed + work.micro_batch_size * compute.per_image
        return (1 - BACKWARD) * both if work.freeze else both

    def hidden(self, work: StepWork) -> float:
        """Returns the seconds of the last micro-batch's backward pass that can hide the transfer of the exchange."""
        return 0.0 if work.freeze else self.overlap * BACKWARD * self.compute_seconds(work)

    def grid(self, allreduce: str, workers: int) -> tuple[int, int] | None:
        """Returns (horizontal, vertical) of an all-reduce, as in training; None if it is impossible."""
        return grid_of(allreduce, workers, self.network.local_size)

    def node_seconds(self, work: StepWork) -> float:
        """Returns the time of a step on one full node, whose workers form a ring."""
        return self.step_seconds(work, (self.network.local_size, 1))


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str, overlap: float | None = None) -> Topology:
    """Loads a built-in topology, or one from a file. Raises UserError. overlap: replaces the topology's own."""
    path = FOLDER / f"{name}.json" if name in names() else Path(name)
    if name in names():
        say_what_is_hidden("topology", name)
    try:
        given = {} if overlap is None else {"overlap": overlap}
        return parse({"cluster": path.stem} | json.loads(path.read_text("utf-8-sig")) | given)
    except FileNotFoundError:
        problem = f"there is no such file; built-in ones: {', '.join(names())}"
    except KeyError as error:
        problem = f"{error.args[0]} is missing"
    except (TypeError, AttributeError):  # such as a number or a list instead of an object
        problem = "the file is not a JSON object like those in launch/topologies"
    except (ValueError, OSError, RecursionError) as error:
        problem = error
    raise UserError(f"--topology={name}: {problem}")


def parse(described: dict) -> Topology:
    """Builds the topology that a JSON object describes. Raises KeyError, TypeError, AttributeError and ValueError."""
    within, between = (Link(_positive(described[where], "latency"), _positive(described[where], "bandwidth"))
                       for where in ("within", "between"))
    local_size = _positive(described, "local_size")
    if local_size != int(local_size):
        raise ValueError("local_size is not a whole number")
    if not 0 <= described["overlap"] <= 1:
        raise ValueError("overlap is not between 0 and 1")
    network = Network(int(local_size), within, between, _positive(described, "slowdown"))
    compute = {model: Compute(_positive(times, "fixed", or_zero=True), _positive(times, "per_image"))
               for model, times in described["compute"].items()}
    if "resnet50" not in compute:
        raise KeyError("resnet50 in compute")
    sources = described.get("sources", {})
    memory = _positive(described, "memory") if "memory" in described else None
    float32 = parse({name: value for name, value in described.items() if name != "float32"} | {
        "compute": described["float32"], "precision": "float32", "sources": {"rows": sources.get("float32", "")},
    }) if "float32" in described else None
    return Topology(str(described["cluster"]), network, described["overlap"], compute, described.get("precision"),
                    sources.get("rows", sources.get("rates", "")), memory, float32)


def _positive(described, key, or_zero=False) -> float:
    value = described[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf or (value == 0 and not or_zero):
        raise ValueError(f"{key} is not a positive number")
    return value
