"""The model of a cluster for a forecast: its network, the speed of its GPUs, and the time of a training step.

    step = accumulation * compute + latency of the exchange + messages that the backward pass does not hide
    compute = fixed * variables / ResNet-50's  +  images * per image * multiply-adds / ResNet-50's

`fixed` is the time of a micro-batch that does not depend on its images (launching kernels, updating weights). Both it
and the time per image are ResNet-50's. Those of other models follow from their numbers of variables and multiply-adds,
unless the topology has measured speeds of the model, to which both are fitted.
The backward pass is two thirds of compute. The fraction `overlap` of the last micro-batch's backward pass can hide the
transfer. The latency cannot be hidden: the last gradient has to be exchanged, too, and all ranks wait for the last one.
A recipe's steps also send a message with the loss and batch norm's moving statistics. It goes before the gradients,
because it is ready after the forward pass.

The speed is that of the precision in which one_gpu and calibration were measured. A recipe's --precision is ignored.

A topology is a JSON file like those in distributed/topologies. Its `sources` tells the reader where each figure comes
from.
"""
import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from common.errors import UserError
from distributed import cost
from distributed.cost import Link, Network
from model_zoo.cost import RESNET50, ModelCost

FOLDER = Path(__file__).parent / "topologies"
BYTES = {"none": 4, "fp16": 2}  # --compression -> bytes of a gradient
RESULTS = 4  # numbers that a step averages besides gradients and statistics: two signals, loss and top-1
MOST_WORKERS = 2**17  # limited, because a forecast iterates over all workers
BACKWARD = 2 / 3  # of compute: gradients of the inputs and of the weights, each as expensive as the forward pass


@dataclass(frozen=True)
class Job:
    """The work of one worker in a step: accumulation_steps micro-batches, then an exchange of `bytes` of gradients.

    results: bytes of the message with loss and statistics; 0: none is sent.
    """

    model: ModelCost
    micro_batch_size: int
    bytes: float
    accumulation_steps: int = 1
    results: float = 0.0

    @classmethod
    def of(cls, model: ModelCost, micro_batch_size: int, accumulation_steps: int, bytes_per_gradient: int,
           moving_statistics: bool) -> "Job":
        """Returns the job of a step in Bigbatch. moving_statistics: whether it averages batch norm's statistics."""
        results = 4 * (RESULTS + moving_statistics * model.statistics)
        return cls(model, micro_batch_size, model.parameters * bytes_per_gradient, accumulation_steps, results)


@dataclass(frozen=True)
class Topology:
    """A cluster. overlap: a fraction between 0 and 1. fixed, per_image: seconds of ResNet-50 on one GPU.

    models: name -> the same two for other models whose speed was measured.
    """

    network: Network
    overlap: float
    fixed: float
    per_image: float
    models: dict[str, tuple[float, float]] = field(default_factory=dict)

    def step_seconds(self, job: Job, grid: tuple[int, int], allreduce: str = "torus") -> float:
        """Returns the time from one update to the next, on horizontal * vertical workers. See cost.cost."""
        exchange = cost.cost(job.bytes, *grid, self.network, allreduce)
        if job.results:
            exchange = exchange.after(cost.cost(job.results, *grid, self.network, allreduce))
        return job.accumulation_steps * self.compute_seconds(job) + exchange.seconds(self.hidden(job))

    def compute_seconds(self, job: Job) -> float:
        """Returns the time of the forward and backward pass of one micro-batch."""
        fixed, per_image = self.models.get(job.model.name) or (
            self.fixed * job.model.variables / RESNET50.variables,
            self.per_image * job.model.multiply_adds / RESNET50.multiply_adds)
        return fixed + job.micro_batch_size * per_image

    def hidden(self, job: Job) -> float:
        """Returns the seconds of the last micro-batch's backward pass that can hide the transfer of the exchange."""
        return self.overlap * BACKWARD * self.compute_seconds(job)

    def grid(self, allreduce: str, workers: int) -> tuple[int, int] | None:
        """Returns (horizontal, vertical) of an all-reduce, as in training; None if it is impossible."""
        return cost.grid_of(allreduce, workers, self.network.local_size)

    def node_seconds(self, job: Job) -> float:
        """Returns the time of a step on one full node, whose workers form a ring."""
        return self.step_seconds(job, (self.network.local_size, 1))


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str, overlap: float | None = None) -> Topology:
    """Loads a built-in topology or a file, and calibrates it with its own overlap. Raises UserError.

    overlap: replaces the topology's own overlap after calibration.
    """
    path = FOLDER / f"{name}.json" if name in names() else Path(name)
    try:
        topology = parse(json.loads(path.read_text()))
        return topology if overlap is None else dataclasses.replace(topology, overlap=overlap)
    except FileNotFoundError:
        raise UserError(f"--topology={name}: there is no such file; built-in ones: {', '.join(names())}") from None
    except KeyError as error:
        raise UserError(f"--topology={name}: {error.args[0]} is missing") from None
    except (TypeError, AttributeError):  # such as a number or a list instead of an object
        raise UserError(f"--topology={name}: the file is not a JSON object like those in distributed/topologies"
                        ) from None
    except (ValueError, ArithmeticError, OSError, RecursionError) as error:
        raise UserError(f"--topology={name}: {error}") from None


def parse(described: dict) -> Topology:
    """Builds the topology that a JSON object describes. Raises KeyError and ValueError.

    slowdown: a number, the name of a built-in topology that has one, or omitted for calibration with two rows.
    one_gpu: images per second of ResNet-50 on one GPU, by batch size. models: the same of other models, by name.
    """
    links = [Link(_positive(described[where], "latency"), _positive(described[where], "bandwidth"))
             for where in ("within", "between")]
    slowdown = described.get("slowdown", 1.0)
    if slowdown in names():
        slowdown = load(slowdown).network.slowdown
    if described["local_size"] != int(_positive(described, "local_size")):
        raise ValueError("local_size is not a whole number")
    if not 0 <= described["overlap"] <= 1:
        raise ValueError("overlap is not between 0 and 1")
    fixed, per_image = _line(described["one_gpu"])
    models = {name: _line(rates) for name, rates in described.get("models", {}).items()}
    network = Network(int(described["local_size"]), *links, _positive({"slowdown": slowdown}, "slowdown"))
    topology = Topology(network, described["overlap"], fixed, per_image, models)
    return calibrated(topology, **described["calibration"]) if "calibration" in described else topology


def line(rates: dict[int, float]) -> tuple[float, float]:
    """Fits a line to step times; returns (seconds per batch, seconds per image). rates: images per second by batch.

    Neither is ever negative. The fit minimizes the squared relative error, so that small batches, which
    determine the time per batch, count as much as large ones. Raises ValueError.
    """
    if len(rates) < 2:
        raise ValueError("one_gpu and models need the rates of at least two batch sizes each")
    batches = np.array(list(rates), float)
    seconds = batches / np.array(list(rates.values()))
    relative = np.stack([1 / seconds, batches / seconds], axis=1)
    fixed, per_image = nnls(relative, np.ones(len(rates)))[0]
    if per_image <= 0:
        raise ValueError("one_gpu: the time of a step does not grow with its batch")
    return float(fixed), float(per_image)


def calibrated(topology: Topology, micro_batch_size: int, bytes_per_gradient: int, rows: list[dict]) -> Topology:
    """Sets the time per image, and with two rows also the slowdown, so that the forecast matches the rows.

    rows: results of ResNet-50, each with `grid` and `images_per_second`. The first row, on one node, determines the
    time per image; the second determines the slowdown. These are two equations in two unknowns. Transfer that is not
    hidden makes them non-linear, so they are solved repeatedly until nothing changes. Raises ValueError if there is no
    solution.
    """
    if len(rows) not in (1, 2) or any(math.prod(row["grid"]) > MOST_WORKERS for row in rows):
        raise ValueError(f"calibration needs one or two rows, each with at most {MOST_WORKERS:,} workers")
    job = Job(RESNET50, micro_batch_size, bytes_per_gradient * RESNET50.parameters)
    idle = dataclasses.replace(topology.network, slowdown=1.0)
    costs = [cost.cost(job.bytes, *row["grid"], idle) for row in rows]
    steps = [math.prod(row["grid"]) * micro_batch_size / row["images_per_second"] for row in rows]
    slowdown = topology.network.slowdown
    for _ in range(100):
        exposed = [one.seconds(topology.hidden(job)) - one.latency for one in costs]
        if len(rows) == 2:
            slowdown = ((steps[1] - exposed[1]) - (steps[0] - exposed[0])) / (costs[1].latency - costs[0].latency)
        per_image = (steps[0] - exposed[0] - slowdown * costs[0].latency - topology.fixed) / micro_batch_size
        if not (slowdown > 0 and per_image > 0):
            break
        before, topology = topology, dataclasses.replace(
            topology, per_image=per_image, network=dataclasses.replace(topology.network, slowdown=slowdown))
        if math.isclose(before.per_image, per_image, rel_tol=1e-12) and before.network.slowdown == slowdown:
            return topology
    raise ValueError("calibration: no time per image and slowdown reproduce these rows")


def _line(rates: dict[str, float]) -> tuple[float, float]:
    return line({int(batch): _positive(rates, batch) for batch in rates})


def _positive(described, key) -> float:
    value = described[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{key} is not a positive number")
    return value
