"""Forecasts the speed of training on a cluster: `uv run python -m launch.scaling --workers=256,1024`.

For each number of workers and each all-reduce, it prints the grid (horizontal x vertical; for the torus, the grid that
training would use; for hierarchical, workers per node x nodes), the time per step, images per second, and the
efficiency: the speed of a worker relative to its speed on one node with the same micro-batch. With a recipe
(--flagfile), these are averages over its phases, and the training time in hours is printed, too. Without one, each
worker processes --micro_batch_size images per step (default: 32). Published results follow, with a forecast for each
whose cluster is known.

distributed/cost.py and distributed/topology.py explain the model. The file of a topology in distributed/topologies
gives the source of each figure. benchmarks/scaling_here.py writes such a file for this machine.
"""
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import model_zoo
from common import command, flags
from common.errors import UsageError, UserError, complain
from common.flags import flag
from data.named import open_named
from distributed import topology as topologies
from distributed.cost import ALLREDUCES
from distributed.topology import BYTES, Job, Topology
from model_zoo.cost import ModelCost, model_cost
from reporting import scaling as report
from training.flags import define, recipes_first, with_image_size
from training.plan import make_plan
from training.settings import Launch, Recipe

PUBLISHED = Path(__file__).parent / "published.json"
MICRO_BATCH_SIZE = 32  # without a recipe, as in arXiv:1811.05233, table 6
CLASSES = 1000  # without a recipe, as in ImageNet
BORROWED = ("model", "image_size", "micro_batch_size", "compression", "train_samples")


def _numbers(texts: list[str]) -> tuple[int, ...]:
    needed = f"needs numbers of workers up to {topologies.MOST_WORKERS}, such as 256 or 4,1024,4096"
    return tuple(sorted(flags.counts(texts, topologies.MOST_WORKERS, needed)))


def _picture(path: str) -> Path:
    if Path(path).suffix not in report.PLOTS:
        raise ValueError(f"needs a file name that ends in {', '.join(report.PLOTS)}")
    return Path(path)


@dataclass(frozen=True)
class Options:
    """This command's own flags.

    workers: Numbers of workers, such as 256 or 4,1024,4096.
    topology: Cluster: the name of a file in distributed/topologies, or the path of a JSON file like those.
    allreduce: All-reduce algorithms to compare. Can be repeated. Default: all.
    overlap: Fraction of the last backward pass that can hide the transfer of the gradients. Default: the topology's.
    json: Print JSON on standard output instead of the table.
    plot: File for a plot of the efficiency: .svg, .png or .pdf.
    """

    workers: tuple[int, ...] = flag([], parse=_numbers)
    topology: str = "abci"
    allreduce: tuple[str, ...] = flag(list(ALLREDUCES), ALLREDUCES)
    overlap: float | None = flag(low=0.0, high=1.0)
    json: bool = False
    plot: Path | None = flag(parse=_picture)


@dataclass(frozen=True)
class Phase:
    """A number of steps with the same job."""

    steps: int
    global_batch_size: int
    job: Job


@dataclass(frozen=True)
class Forecast:
    """What to forecast: a recipe and its sizes. samples: size of the training set; None without --flagfile."""

    recipe: Recipe
    micro_batch_size: int | None
    bytes_per_gradient: int
    samples: int | None
    classes: int


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    if command.asks_for_help(argv):
        values = all_flags(has_recipe=False)
        command.print_help(__doc__, *flags.described(values, (*flags.names(Options), *BORROWED)),
                           "--flagfile=RECIPE forecasts that recipe's training.")
        return 0
    with command.shell("launch.scaling") as ending, command.json_only_on_stdout():
        options, asked = parse(argv)
        if asked.bytes_per_gradient == 2 and options.overlap is None and not options.json:
            complain("note: float16 gradients are exchanged after the backward pass; --overlap=0 forecasts this",
                     "launch.scaling")
        topology = topologies.load(options.topology, options.overlap)
        rows = forecast(options, asked, topology)
        if not rows:
            raise UserError("--allreduce=hierarchical needs full nodes; give multiples of "
                            f"{topology.network.local_size} workers")
        model = asked.recipe.model
        published = published_results(options.topology, model)
        if options.plot:
            report.plot(options.plot, rows, published, f"{model} on {options.topology}")
        print(json.dumps(rows) if options.json else "\n".join(report.lines(rows, published)), flush=True)
    return ending.code


def forecast(options: Options, asked: Forecast, topology: Topology) -> list[dict]:
    """Returns a row per number of workers and all-reduce; none for hierarchical if the last node is not full."""
    model, rows = model_cost(asked.recipe.model, asked.classes, asked.recipe.final_image_size), []
    for workers in options.workers:
        planned = phases(asked, model, workers)
        for allreduce in options.allreduce:
            if grid := topology.grid(allreduce, workers):
                rows.append(row(topology, planned, workers, allreduce, grid, has_recipe=asked.samples is not None))
    return rows


def row(topology, planned, workers, allreduce, grid, has_recipe) -> dict:
    """Returns one row of the output, averaged over the phases. The grid is the same in all of them."""
    steps = sum(phase.steps for phase in planned)
    seconds = sum(phase.steps * topology.step_seconds(phase.job, grid, allreduce) for phase in planned)
    on_a_node = sum(phase.steps * topology.node_seconds(phase.job) for phase in planned)
    images = sum(phase.steps * phase.global_batch_size for phase in planned)
    return {"workers": workers, "allreduce": allreduce, "grid": list(grid), "step_seconds": seconds / steps,
            "images_per_second": images / seconds, "efficiency": on_a_node / seconds,
            **({"hours": seconds / 3600} if has_recipe else {})}


def phases(asked: Forecast, model: ModelCost, workers: int) -> list[Phase]:
    """Returns the phases of the recipe's plan, or one step of one micro-batch without a recipe."""
    if asked.samples is None:
        batch = asked.micro_batch_size or MICRO_BATCH_SIZE
        return [Phase(1, workers * batch, Job(model, batch, model.parameters * asked.bytes_per_gradient))]
    return [Phase(phase.steps, phase.global_batch_size,
                  Job.of(model, phase.micro_batch_size, phase.accumulation_steps, asked.bytes_per_gradient,
                         asked.recipe.batch_norm_statistics == "moving"))
            for phase in make_plan(asked.recipe, asked.micro_batch_size, workers, asked.samples).phases]


def published_results(topology: str, model: str) -> list[dict]:
    """Returns the published results for this topology and model, and those of arXiv:1811.05233, table 2, for any.

    Each has our forecast, unless its topology is unknown.
    """
    rows = []
    for published in json.loads(PUBLISHED.read_text()):
        here = (published["topology"], published["model"]) == (topology, model)
        if here or not published["images_per_second"]:
            rows.append(published | (ours(published) if published["topology"] else {}))
    return rows


def ours(published: dict) -> dict:
    """Returns our forecast for a published result."""
    topology, workers = topologies.load(published["topology"]), published["workers"]
    model = model_cost(published["model"], CLASSES, model_zoo.MODELS[published["model"]].image_size)
    job = Job(model, published["micro_batch_size"], model.parameters * published["bytes_per_gradient"])
    forecast_row = row(topology, [Phase(1, workers * job.micro_batch_size, job)], workers, published["allreduce"],
                       topology.grid(published["allreduce"], workers), has_recipe=False)
    return {"forecast_images_per_second": forecast_row["images_per_second"],
            "forecast_efficiency": forecast_row["efficiency"]}


def parse(argv) -> tuple[Options, Forecast]:
    """Parses a command line. Raises UsageError, and UserError if the dataset is missing.

    With --train_samples, the dataset is not opened, and ImageNet's number of classes is assumed.
    """
    recipes, given = recipes_first(argv[1:])
    values = flags.read(all_flags(bool(recipes)), [argv[0], *recipes, *given])
    options, recipe = flags.parsed(values, Options), with_image_size(flags.parsed(values, Recipe))
    if not options.workers:
        raise UsageError("--workers is missing; give one or more numbers of workers, such as --workers=256,1024")
    samples, classes = values.train_samples if recipes else None, CLASSES
    if recipes and not samples:
        dataset = open_named(recipe.data_dir)
        samples, classes = dataset.train.samples, len(dataset.classes)
    return options, Forecast(recipe, values.micro_batch_size, BYTES[values.compression], samples, classes)


def all_flags(has_recipe: bool):
    """Defines this command's own flags, and the flags of train.py that a recipe or a run's flags.txt may hold."""
    values, others = flags.define(Options), define()
    for name in {*flags.names(Recipe), *flags.names(Launch), "train_samples"} - {*flags.names(Options)}:
        values[name] = others[name]
    values["micro_batch_size"].help = f"Images per worker and step. Default: the recipe's, or {MICRO_BATCH_SIZE}."
    values["train_samples"].help = "Number of training samples of the recipe, if its dataset is not available."
    if not has_recipe:
        values.set_default("model", "resnet50")
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv))
