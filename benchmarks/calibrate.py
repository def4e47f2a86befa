"""Calibrates topologies with published speeds: `uv run python -m benchmarks.calibrate launch/topologies/abci.json ...`

It prints the `slowdown` and the `compute` that belong into each file, from what the file lists in `calibration`:

- `rates`: images per second of models on one GPU, by batch size. A line through the times of a step gives the two times
  in `compute`: of a micro-batch, whatever its size, and of each image.
- `rows`: results of ResNet-50 with `micro_batch_size` and `bytes_per_gradient`, each with `grid` and
  `images_per_second`. The first row, on one node, replaces ResNet-50's time per image. A second row gives the slowdown.
- `slowdown`: the built-in topology whose slowdown is used, if there is no second row.
- `float32`: the calibration of `float32`, if `compute` has another precision. It has the same `rates`.
"""
import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from launch import topology
from launch.topology import Compute, StepWork, Topology
from model_zoo.cost import RESNET50


def line(rates: dict[int, float]) -> Compute:
    """Fits a line to step times. rates: images per second by batch size.

    Neither time is ever negative. The fit minimizes the squared relative error, so that small batches, which determine
    the time per batch, count as much as large ones. Raises ValueError.
    """
    if len(rates) < 2:
        raise ValueError("rates need at least two batch sizes of each model")
    batches = np.array(list(rates), float)
    seconds = batches / np.array(list(rates.values()))
    relative = np.stack([1 / seconds, batches / seconds], axis=1)
    fixed, per_image = nnls(relative, np.ones(len(rates)))[0]
    if per_image <= 0:
        raise ValueError("the time of a step does not grow with its batch")
    return Compute(float(fixed), float(per_image))


def calibrated(described: dict, precision: str = "") -> Topology:
    """Returns the topology of a file's content, calibrated. Raises ValueError if no values reproduce the rows.

    precision: float32 for the calibration of that name.
    """
    given = described["calibration"]
    given = {"rates": given["rates"]} | given[precision] if precision else given
    compute = {model: line({int(batch): rate for batch, rate in rates.items()})
               for model, rates in given["rates"].items()}
    slowdown = topology.load(given["slowdown"]).network.slowdown if "slowdown" in given else 1.0
    start = topology.parse(described | {"slowdown": slowdown, "compute": {
        model: dataclasses.asdict(times) for model, times in compute.items()}})
    return solved(start, given) if "rows" in given else start


def solved(start: Topology, given: dict) -> Topology:
    """Returns the topology whose time per image, and with two rows also slowdown, reproduces the rows.

    These are one or two linear equations, but for the transfer that is not hidden: it depends on the solution. They are
    therefore solved repeatedly until nothing changes.
    """
    batch = given["micro_batch_size"]
    work = StepWork(RESNET50, batch, given["bytes_per_gradient"] * RESNET50.parameters)
    idle = dataclasses.replace(start.network, slowdown=1.0)
    costs = [topology.cost(work.bytes, *row["grid"], idle) for row in given["rows"]]
    steps = [math.prod(row["grid"]) * batch / row["images_per_second"] for row in given["rows"]]
    now, slowdown, fixed = start, start.network.slowdown, start.compute["resnet50"].fixed
    for _ in range(100):
        rest = [step - (exchange.seconds(now.hidden(work)) - exchange.latency)
                for step, exchange in zip(steps, costs, strict=True)]
        if len(rest) == 2:
            slowdown = (rest[1] - rest[0]) / (costs[1].latency - costs[0].latency)
        per_image = (rest[0] - slowdown * costs[0].latency - fixed) / batch
        if not (slowdown > 0 and per_image > 0):
            break
        before, now = now, dataclasses.replace(
            start, network=dataclasses.replace(idle, slowdown=slowdown),
            compute=start.compute | {"resnet50": Compute(fixed, per_image)})
        if all(map(math.isclose, (before.network.slowdown, before.compute["resnet50"].per_image),
                   (slowdown, per_image))):
            return now
    raise ValueError("calibration: no time per image and slowdown reproduce these rows")


def constants(topology: Topology) -> dict:
    """Returns what belongs into the file, with eight digits."""
    def rounded(value):
        return float(f"{value:.8g}")

    return {"slowdown": rounded(topology.network.slowdown),
            "compute": {model: {"fixed": rounded(times.fixed), "per_image": rounded(times.per_image)}
                        for model, times in topology.compute.items()}}


def main():
    for path in map(Path, sys.argv[1:]):
        print(path)
        described = json.loads(path.read_text())
        found = constants(calibrated(described))
        if "float32" in described["calibration"]:
            found["float32"] = constants(calibrated(described, "float32"))["compute"]
        for name, value in found.items():
            print(f'  "{name}": {json.dumps(value)},')


if __name__ == "__main__":
    main()
