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

The speed is that of the precision in which the rates of the topology were measured. A recipe's --precision is ignored.

A topology is a JSON file like those in launch/topologies. benchmarks/calibrate.py computes its `slowdown` and `compute`
from published rates, which its `calibration` lists, and `sources` says where each figure comes from.
"""
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from launch import cost
from launch.cost import Link, Network
from model_zoo.cost import RESNET50, ModelCost
from plan.plan import Phase
from plan.settings import Recipe

FOLDER = Path(__file__).parent / "topologies"
BYTES = {"none": 4, "fp16": 2}  # --compression -> bytes of a gradient
RESULTS = 4  # numbers that a step averages besides gradients and statistics: two signals, loss and top-1
BACKWARD = 2 / 3  # of compute: gradients of the inputs and of the weights, each as expensive as the forward pass


@dataclass(frozen=True)
class StepWork:
    """The work of one worker in a step: accumulation_steps micro-batches, then an exchange of `bytes` of gradients.

    results: bytes of the message with loss and statistics; 0: none is sent.
    """

    model: ModelCost
    micro_batch_size: int
    bytes: float
    accumulation_steps: int = 1
    results: float = 0.0

    @classmethod
    def of(cls, model: ModelCost, phase: Phase, recipe: Recipe, bytes_per_gradient: int) -> "StepWork":
        """Returns the work of a step in Bigbatch, which averages batch norm's statistics if they are moving ones."""
        results = 4 * (RESULTS + (model.statistics if recipe.batch_norm_statistics == "moving" else 0))
        return cls(model, phase.micro_batch_size, model.parameters * bytes_per_gradient, phase.accumulation_steps,
                   results)


@dataclass(frozen=True)
class Compute:
    """Seconds of the forward and backward pass on one GPU: of a micro-batch, whatever its size, and of each image."""

    fixed: float
    per_image: float


@dataclass(frozen=True)
class Topology:
    """A cluster. cluster: what it is, in words. overlap: a fraction between 0 and 1. compute: model -> its times."""

    cluster: str
    network: Network
    overlap: float
    compute: dict[str, Compute]

    def step_seconds(self, work: StepWork, grid: tuple[int, int], allreduce: str = "torus") -> float:
        """Returns the time from one update to the next, on horizontal * vertical workers. See cost.cost."""
        exchange = cost.cost(work.bytes, *grid, self.network, allreduce)
        if work.results:
            exchange = exchange.after(cost.cost(work.results, *grid, self.network, allreduce))
        return work.accumulation_steps * self.compute_seconds(work) + exchange.seconds(self.hidden(work))

    def compute_of(self, model: ModelCost) -> Compute:
        """Returns the times of a model: its own if the topology has them, otherwise ResNet-50's, scaled."""
        resnet50 = self.compute["resnet50"]
        return self.compute.get(model.name) or Compute(
            resnet50.fixed * model.variables / RESNET50.variables,
            resnet50.per_image * model.multiply_adds / RESNET50.multiply_adds)

    def compute_seconds(self, work: StepWork) -> float:
        """Returns the time of the forward and backward pass of one micro-batch."""
        compute = self.compute_of(work.model)
        return compute.fixed + work.micro_batch_size * compute.per_image

    def hidden(self, work: StepWork) -> float:
        """Returns the seconds of the last micro-batch's backward pass that can hide the transfer of the exchange."""
        return self.overlap * BACKWARD * self.compute_seconds(work)

    def grid(self, allreduce: str, workers: int) -> tuple[int, int] | None:
        """Returns (horizontal, vertical) of an all-reduce, as in training; None if it is impossible."""
        return cost.grid_of(allreduce, workers, self.network.local_size)

    def node_seconds(self, work: StepWork) -> float:
        """Returns the time of a step on one full node, whose workers form a ring."""
        return self.step_seconds(work, (self.network.local_size, 1))


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str, overlap: float | None = None) -> Topology:
    """Loads a built-in topology, or one from a file. Raises UserError. overlap: replaces the topology's own."""
    path = FOLDER / f"{name}.json" if name in names() else Path(name)
    try:
        topology = parse({"cluster": path.stem} | json.loads(path.read_text()))
        return topology if overlap is None else dataclasses.replace(topology, overlap=overlap)
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
    return Topology(str(described["cluster"]), network, described["overlap"], compute)


def _positive(described, key, or_zero=False) -> float:
    value = described[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf or (value == 0 and not or_zero):
        raise ValueError(f"{key} is not a positive number")
    return value
