"""Forecasts how fast a training runs on how many workers: `uv run python -m launch.scaling --workers=256,1024`.

For each number of workers and each all-reduce: the grid (horizontal x vertical; the torus takes the best), the time of
a step, images per second, and efficiency, the speed of a worker against its speed on one node of the topology with the
same micro-batch. Given a recipe (--flagfile), averages over its phases, and the hours it takes; without one, workers
take --micro_batch_size images (32) each. Beside them what papers have published, and the forecast for that.

The terms of the model stand in optim/exchange_cost.py and launch/topology.py; where a topology's figures come from
stands in its file under launch/topologies. A file of your own may be given: benchmarks/scaling_here.py writes one.
"""
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from absl import flags as absl_flags

import model_zoo
from data.dataset import DatasetError
from data.named import open_named
from launch import topology as topologies
from launch.topology import Job, Topology
from model_zoo.cost import ModelCost, model_cost
from optim.exchange_cost import ALLREDUCES
from reporting import scaling as report
from reporting.standard_output import json_alone_on_stdout
from training import flags
from training.errors import UserError
from training.plan import make_plan

PUBLISHED = Path(__file__).parent / "published.json"
MICRO_BATCH_SIZE = 32  # without a recipe: that of arXiv:1811.05233, table 6
CLASSES = 1000  # of a model without a recipe: ImageNet's
BYTES = {"none": 4, "fp16": 2}
BORROWED = ("model", "image_size", "micro_batch_size", "compression", "train_samples")
OWN = ("workers", "topology", "allreduce", "overlap", "json", "plot")


@dataclass(frozen=True)
class Phase:
    """So many steps of the same job."""

    steps: int
    global_batch_size: int
    job: Job


def main(argv) -> int:
    """Runs a command line; returns the exit code: 0 done, 2 a flag is wrong, 1 anything else is."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if {"--help", "-help", "-h", "--helpfull"} & set(argv[1:]):
        print(help_text())
        return 0
    try:
        config = parse(argv)
        with json_alone_on_stdout():
            run(config)
        return 0
    except (flags.UsageError, UserError, DatasetError, OSError, ValueError) as error:
        print(f"launch.scaling: {error}", file=sys.stderr)
        return 2 if isinstance(error, flags.UsageError) else 1
    except KeyboardInterrupt:
        return 130


def run(config) -> None:
    topology = topologies.load(config.topology, config.overlap)
    rows = forecast(config, topology)
    if not rows:
        raise UserError("--allreduce=hierarchical needs whole nodes: multiples of "
                        f"{topology.network.local_size} workers")
    published = beside(config)
    if config.plot:
        report.plot(Path(config.plot), rows, published, f"{config.model} on {config.topology}")
    print(json.dumps(rows) if config.json else "\n".join(report.lines(rows, published)), flush=True)


def forecast(config, topology: Topology) -> list[dict]:
    """A row for each number of workers and all-reduce; none for a hierarchical one whose last node is not full."""
    samples, classes = training_set(config) if config.has_recipe else (None, CLASSES)
    model, rows = model_cost(config.model, classes, config.image_size), []
    for workers in config.workers:
        planned = phases(config, model, workers, samples)
        for allreduce in config.allreduce:
            if grid := topology.grid(allreduce, workers, planned[0].job):
                rows.append(row(topology, planned, workers, allreduce, grid, config.has_recipe))
    return rows


def row(topology, planned, workers, allreduce, grid, has_recipe) -> dict:
    """An object of the JSON; averages over the phases, which share a grid."""
    steps = sum(phase.steps for phase in planned)
    seconds = sum(phase.steps * topology.step_seconds(phase.job, grid) for phase in planned)
    on_a_node = sum(phase.steps * topology.node_seconds(phase.job) for phase in planned)
    images = sum(phase.steps * phase.global_batch_size for phase in planned)
    return {"workers": workers, "allreduce": allreduce, "grid": list(grid), "step_seconds": seconds / steps,
            "images_per_second": images / seconds, "efficiency": on_a_node / seconds,
            **({"hours": seconds / 3600} if has_recipe else {})}


def phases(config, model: ModelCost, workers: int, samples: int | None) -> list[Phase]:
    """Those of the recipe's plan; without a recipe one step of one micro-batch."""
    size = model.parameters * BYTES[config.compression]
    if not config.has_recipe:
        batch = config.micro_batch_size or MICRO_BATCH_SIZE
        return [Phase(1, workers * batch, Job(model, batch, size))]
    return [Phase(phase.steps, phase.global_batch_size,
                  Job(model, phase.micro_batch_size, size, phase.accumulation_steps))
            for phase in make_plan(config, workers, samples).phases]


def training_set(config) -> tuple[int, int]:
    """(training samples, classes). A recipe that says how many samples there are is one for ImageNet's classes."""
    if config.train_samples:
        return config.train_samples, CLASSES
    dataset = open_named(config.data_dir)
    return dataset.train.samples, len(dataset.classes)


def beside(config) -> list[dict]:
    """What papers report: table 2 of arXiv:1811.05233, and what is of this topology and model; with our forecasts."""
    rows = []
    for published in json.loads(PUBLISHED.read_text()):
        here = (published["topology"], published["model"]) == (config.topology, config.model)
        if here or not published["images_per_second"]:
            rows.append(published | (ours(published) if published["topology"] else {}))
    return rows


def ours(published: dict) -> dict:
    """Our forecast for what a paper reports."""
    topology, workers = topologies.load(published["topology"]), published["workers"]
    model = model_cost(published["model"], CLASSES, model_zoo.MODELS[published["model"]].image_size)
    job = Job(model, published["micro_batch_size"], model.parameters * published["bytes_per_gradient"])
    said = row(topology, [Phase(1, workers * job.micro_batch_size, job)], workers, published["allreduce"],
               topology.grid(published["allreduce"], workers, job), has_recipe=False)
    return {"forecast_images_per_second": said["images_per_second"], "forecast_efficiency": said["efficiency"]}


def parse(argv) -> SimpleNamespace:
    """The flags as attributes, with has_recipe. Raises flags.UsageError."""
    values = define()
    has_recipe = any(word.startswith(("--flagfile", "-flagfile")) for word in argv[1:])
    if not has_recipe:
        values.set_default("model", "resnet50")
    recipes_first = sorted(argv[1:], key=lambda word: not word.startswith(("--flagfile=", "-flagfile=")))
    try:
        rest = values([argv[0], *recipes_first])
        if rest[1:]:
            raise absl_flags.Error(f"'{rest[1]}' is not a flag; launch.scaling --help lists them")
        if not values.workers:
            raise absl_flags.Error("--workers=N or --workers=N,M,… says for how many workers to forecast")
    except (absl_flags.Error, UnicodeDecodeError) as error:
        raise flags.UsageError(" ".join(str(error).split())[:1000]) from None
    config = SimpleNamespace(**{name: values[name].value for name in values})
    config.has_recipe = has_recipe
    config.workers = sorted({int(text) for text in config.workers})
    config.image_size = config.image_size or model_zoo.MODELS[config.model].image_size
    return config


def define() -> absl_flags.FlagValues:
    """The flags of this command, and those of train.py that a recipe, or a run's flags.txt, may hold."""
    values, others = absl_flags.FlagValues(), flags.define()
    for name in {*others.groups["Recipe"], *others.groups["Launch"], "train_samples"} - {*OWN}:
        values[name] = others[name]
    v = {"flag_values": values}
    absl_flags.DEFINE_list("workers", None, "Numbers of workers: 256 or 4,1024,4096.", **v)
    absl_flags.DEFINE_string("topology", "abci", f"The cluster: {', '.join(topologies.names())}, or a JSON file like "
                             "those in launch/topologies.", **v)
    absl_flags.DEFINE_multi_enum("allreduce", list(ALLREDUCES), list(ALLREDUCES), "All-reduces to compare; may be "
                                 "given again for another; by default all.", **v)
    absl_flags.DEFINE_float("overlap", None, "The share of the last backward pass under which the exchange's bytes can "
                            "be hidden, 0 to 1; by default the topology's.", lower_bound=0.0, upper_bound=1.0, **v)
    absl_flags.DEFINE_bool("json", False, "Print JSON on standard output instead of the table.", **v)
    absl_flags.DEFINE_string("plot", None, "A file for a plot of efficiency against workers: .svg, .png or .pdf.", **v)
    absl_flags.register_validator(
        "workers", lambda texts: all(text.isdecimal() and 0 < int(text) <= topologies.MOST_WORKERS
                                  for text in texts or ()),
        f"wants numbers of workers, such as 256 or 4,1024,4096, of {topologies.MOST_WORKERS} at most",
        flag_values=values)
    absl_flags.register_validator("overlap", lambda share: share is None or math.isfinite(share), "wants 0 to 1",
                                  flag_values=values)
    absl_flags.register_validator("plot", lambda path: path is None or Path(path).suffix in report.PLOTS,
                                  f"wants a name that ends in {', '.join(report.PLOTS)}", flag_values=values)
    return values


def help_text() -> str:
    values = define()
    values.set_default("model", "resnet50")
    return "\n".join([__doc__, *flags.described(values, (*OWN, *BORROWED)),
                      "--flagfile=RECIPE forecasts that recipe's training."])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
