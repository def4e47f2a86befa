"""Forecasts the speed of training on a cluster: `uv run python -m launch.scaling --workers=256,1024`.

For each number of workers and each all-reduce, it prints the grid (horizontal x vertical; for the torus, the grid that
training would use; for hierarchical, workers per node x nodes), the time per step, images per second, and the
efficiency: the speed of a worker relative to its speed on one node with the same micro-batch. With a recipe
(--flagfile), these are averages over its phases, and the training time is printed, too. The speed is that of the
recipe's --precision, and the micro-batch the one that the launch scripts choose for the topology's GPUs. Without a
recipe, each worker processes --micro_batch_size images per step (default: 32). Published results follow, with a
forecast for each whose cluster is known.

launch/topology.py explains the model. The file of a topology in launch/topologies gives the source of each figure.
benchmarks/scaling_here.py writes such a file for this machine.
"""
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import model_zoo
from common import command, flags
from common.errors import UsageError, UserError
from common.flags import flag
from data.named import open_named
from launch import topology as topologies
from launch.job import micro_batch_flags
from launch.topology import BYTES, StepWork, Topology
from model_zoo.cost import ModelCost, model_cost
from optim.schedules import Piecewise
from plan.allreduce import ALLREDUCES
from plan.flags import define, recipes_first, with_image_size
from plan.plan import make_plan
from plan.settings import Launch, Recipe, Run, Settings
from plan.values import sizes

PUBLISHED = Path(__file__).parent / "published.json"
MOST_WORKERS = 2**17  # limited, because a forecast iterates over all workers
MICRO_BATCH_SIZE = 32  # without a recipe, as in arXiv:1811.05233, table 6
CLASSES = 1000  # without a recipe, as in ImageNet
GOOD = 0.8  # efficiency that the verdict asks for
FASTER = 1.05  # times as fast: a difference that the verdict tells
BORROWED = ("model", "image_size", "precision", "micro_batch_size", "compression", "train_samples", "workers_schedule")


def _numbers(texts: list[str]) -> tuple[int, ...]:
    needed = f"needs numbers of workers up to {MOST_WORKERS}, such as 256 or 4,1024,4096"
    return tuple(sorted(flags.counts(texts, MOST_WORKERS, needed)))


@dataclass(frozen=True)
class Options:
    """This command's own flags."""

    workers: tuple[int, ...] = flag([], "Numbers of workers, such as 256 or 4,1024,4096.", parse=_numbers)
    topology: str = flag("abci", "Cluster: the name of a file in launch/topologies, or the path of a JSON file like "
        "those.", path=True)
    allreduce: tuple[str, ...] = flag(list(ALLREDUCES), "All-reduce algorithms to compare. Can be repeated. Default: "
        "all.", ALLREDUCES)
    overlap: float | None = flag(None, "Fraction of the last backward pass that can hide the transfer of the "
        "gradients. Default: the topology's.", low=0.0, high=1.0)
    json: bool = flag(False, "Print JSON on standard output instead of the table.")


@dataclass(frozen=True)
class Training:
    """What is trained. samples: size of the training set, or None without a recipe; `recipe` then has the defaults.

    workers_schedule: number of workers from each epoch on. memory: of a GPU in GiB, or None if it is unknown.
    """

    recipe: Recipe
    micro_batch_size: int | None
    bytes_per_gradient: int
    samples: int | None
    classes: int
    workers_schedule: Piecewise | None = None
    memory: float | None = None

    def micro_batch(self, workers: int) -> int | None:
        """Returns the size that was given, or the launch scripts' for so many workers, or None: train.py's default."""
        settings = Settings(self.recipe, Launch(self.micro_batch_size, workers_schedule=self.workers_schedule), Run(),
                            {}, "")
        chosen = micro_batch_flags(settings, workers, self.memory)
        return int(chosen[0].partition("=")[2]) if chosen else self.micro_batch_size


@dataclass(frozen=True)
class Steps:
    """A number of steps with the same work."""

    count: int
    global_batch_size: int
    work: StepWork
    workers: int


@command.program("launch.scaling", __doc__, lambda _: [
    *flags.described(all_flags(has_recipe=False), (*flags.names(Options), *BORROWED)),
    "--flagfile=RECIPE forecasts that recipe's training."], is_alone=True)
@command.json_only_on_stdout()
def main(argv) -> None:
    """Runs a command line."""
    options, training = parse(argv)
    topology = topologies.load(options.topology, options.overlap).in_precision(training.recipe.precision)
    training = replace(training, memory=topology.memory)
    model = model_cost(training.recipe.model, training.classes, training.recipe.final_image_size)
    rows = forecast(options, training, model, topology)
    if not rows:
        raise UserError("--allreduce=hierarchical needs full nodes; give multiples of "
                        f"{topology.network.local_size} workers")
    published = published_results(options.topology, training.recipe.model)
    about = assumptions(training, model, topology)
    command.output(*([json.dumps(rows)] if options.json else lines(about, rows, published)))


def assumptions(training: Training, model: ModelCost, topology: Topology) -> dict[str, str]:
    """Returns the inputs and assumptions of a forecast, as name -> text."""
    network = topology.network
    compute = topology.compute_of(model)
    if training.samples:
        batch = (f"{training.recipe.epochs:g} epochs of {training.samples:,} images; global batch and phases of the "
                 "recipe" + (f"; micro-batches of the launch scripts for GPUs of {training.memory:g} GB"
                             if training.memory and not training.micro_batch_size else ""))
    else:
        batch = f"{training.micro_batch_size or MICRO_BATCH_SIZE} images per worker and step"
    trained = f", of which {model.last_layer:,} are trained" if training.recipe.freeze else ""
    return {
        "cluster": f"{topology.cluster}; {network.local_size} workers per node",
        "model": f"{training.recipe.model}, {training.recipe.final_image_size} pixels, {model.parameters:,} parameters"
                 + trained,
        "batch": batch,
        "gradients": f"float{8 * training.bytes_per_gradient}; {topology.overlap:.0%} of the last micro-batch's "
                     "backward pass can hide their transfer",
        "compute": f"{1e3 * compute.fixed:.3g} ms per micro-batch and {1e3 * compute.per_image:.3g} ms per image"
                   + speed(training.recipe.precision, topology)
                   + "; a third of that with --freeze, for the forward pass alone" * training.recipe.freeze,
        "links": f"{network.within.bandwidth / 1e9:g} GB/s per worker within a node, "
                 f"{network.between.bandwidth / 1e9:g} GB/s per node between nodes",
        "messages": f"{1e6 * network.within.latency:.3g} µs within a node, {1e6 * network.between.latency:.3g} µs "
                    f"between nodes, {network.slowdown:.3g} times as long during training"}


def speed(precision: str | None, topology: Topology) -> str:
    """Returns the precision and the source of a topology's measured speed, as the end of a sentence."""
    known = topology.precision
    if not known:
        return ""
    is_known = not precision or (precision == "float32") == (known == "float32")
    instead = "" if is_known else f", because none is known in {precision}"
    source = topology.source.partition(";")[0]
    return f" in {known}{instead}" + (f": {source}" if source else "")


def forecast(options: Options, training: Training, model: ModelCost, topology: Topology) -> list[dict]:
    """Returns a row per number of workers and all-reduce; none for hierarchical if the last node is not full."""
    rows = []
    for workers in options.workers:
        planned = steps_of(training, model, workers)
        for allreduce in options.allreduce:
            if all(topology.grid(allreduce, steps.workers) for steps in planned):
                rows.append(row(topology, planned, workers, allreduce))
                if not training.samples:
                    del rows[-1]["hours"]
    return rows


def row(topology: Topology, planned: list[Steps], workers: int, allreduce: str) -> dict:
    """Returns one row of the output, averaged over the steps. The grid is that of `workers`, the most of a phase."""
    seconds = sum(steps.count * topology.step_seconds(steps.work, topology.grid(allreduce, steps.workers), allreduce)
                  for steps in planned)
    on_a_node = sum(steps.count * topology.node_seconds(steps.work) for steps in planned)
    images = sum(steps.count * steps.global_batch_size for steps in planned)
    return {"workers": workers, "allreduce": allreduce, "grid": list(topology.grid(allreduce, workers)),
            "step_seconds": seconds / sum(steps.count for steps in planned), "images_per_second": images / seconds,
            "efficiency": on_a_node / seconds, "hours": seconds / 3600}


def steps_of(training: Training, model: ModelCost, workers: int) -> list[Steps]:
    """Returns the steps of each phase of the recipe's plan, or one step of one micro-batch without a recipe."""
    if not training.samples:
        batch = training.micro_batch_size or MICRO_BATCH_SIZE
        return [one_step(model, batch, training.bytes_per_gradient, workers, training.recipe.freeze)]
    first = training.workers_schedule.values[0] if training.workers_schedule else workers
    plan = make_plan(training.recipe, training.micro_batch(first), workers, training.samples,
                     workers_schedule=training.workers_schedule)
    return [Steps(phase.steps, phase.global_batch_size,
                  StepWork.of(model, phase, training.recipe, training.bytes_per_gradient), phase.workers)
            for phase in plan.phases]


def one_step(model: ModelCost, micro_batch_size: int, bytes_per_gradient: int, workers: int, freeze: bool = False
             ) -> Steps:
    work = StepWork(model, micro_batch_size, model.trained(freeze) * bytes_per_gradient, freeze=freeze)
    return Steps(1, workers * micro_batch_size, work, workers)


def published_results(topology: str, model: str) -> list[dict]:
    """Returns the published results for this topology, of the model or of ResNet-50, with our forecasts.

    Those of arXiv:1811.05233, table 2, are always included. One whose topology is unknown has no forecast.
    """
    rows = []
    for published in json.loads(PUBLISHED.read_text()):
        here = published["topology"] == topology and published["model"] in (model, "resnet50")
        if here or not published["images_per_second"]:
            rows.append(published | (ours(published) if published["topology"] else {}))
    return rows


def ours(published: dict) -> dict:
    """Returns our forecast for a published result."""
    model = model_cost(published["model"], CLASSES, model_zoo.MODELS[published["model"]].image_size)
    step = one_step(model, published["micro_batch_size"], published["bytes_per_gradient"], published["workers"])
    topology = topologies.load(published["topology"]).in_precision(published.get("precision"))
    forecast_row = row(topology, [step], published["workers"], published["allreduce"])
    return {f"forecast_{name}": forecast_row[name] for name in ("images_per_second", "efficiency")}


def lines(about: dict[str, str], rows: list[dict], published: list[dict]) -> list[str]:
    """Returns the output for a terminal, from what `assumptions`, `forecast` and `published_results` return."""
    shown = [f"{name}: {text}" for name, text in about.items()]
    for heading, texts in (("", forecasts(rows)), ("published (forecast)", results(published))):
        shown += ["", heading] if heading else [""]
        shown += command.table(texts)
    return [*shown, "", f"verdict: {verdict(rows)}"]


def verdict(rows: list[dict]) -> str:
    """Returns sentences: the fastest all-reduce on the most workers, and on how many workers the fastest is good."""
    best = {row["workers"]: row for row in sorted(rows, key=lambda row: row["images_per_second"])}
    largest = max(best)
    rates = {row["allreduce"]: row["images_per_second"] for row in rows if row["workers"] == largest}
    fastest, slowest = (choice(rates, key=rates.get) for choice in (max, min))
    gain = (f"On {largest:,} workers, {fastest} is the fastest all-reduce, {rates[fastest] / rates[slowest]:.1f} times "
            f"as fast as {slowest}. With the fastest, the") if rates[fastest] > FASTER * rates[slowest] else "The"
    groups = {"at least": [], "below": []}
    for workers, row in sorted(best.items()):
        groups["at least" if row["efficiency"] >= GOOD else "below"].append(f"{workers:,}")
    judged = (f"{limit} {GOOD:.0%} on {', '.join(numbers)} worker{'s' * (numbers != ['1'])}"
              for limit, numbers in groups.items() if numbers)
    return f"{gain} efficiency is {' and '.join(judged)}."


def forecasts(rows: list[dict]) -> list[dict[str, str]]:
    """Returns the lines of the table: column -> text."""
    shown = [{"workers": f"{row['workers']:,}", "all-reduce": row["allreduce"], "grid": "x".join(map(str, row["grid"])),
              "step, ms": f"{1000 * row['step_seconds']:,.1f}", "images/s": f"{row['images_per_second']:,.0f}",
              "efficiency": f"{row['efficiency']:.1%}"} for row in rows]
    if "hours" in rows[0]:
        with_seconds = min(row["hours"] for row in rows) < 1
        for text, row in zip(shown, rows, strict=True):
            text["h:mm:ss" if with_seconds else "h:mm"] = clock(row["hours"], with_seconds)
    return shown


def clock(hours: float, with_seconds: bool) -> str:
    """Returns a time as h:mm, or as h:mm:ss."""
    minutes, seconds = divmod(round(3600 * hours), 60) if with_seconds else (round(60 * hours), 0)
    return f"{minutes // 60}:{minutes % 60:02}" + f":{seconds:02}" * with_seconds


def results(published: list[dict]) -> list[dict[str, str]]:
    """Returns the lines of the table of published results, with our forecast in brackets."""
    def both(row, quantity, form):
        return " ".join(form.format(value) for form, value in (
            (form, row[quantity]), (f"({form})", row.get(f"forecast_{quantity}"))) if value and row[quantity])

    return [{"workers": f"{row['workers']:,}", "who": row["who"], "images/s": both(row, "images_per_second", "{:,.0f}"),
             "efficiency": both(row, "efficiency", "{:.1%}"), "source": row["source"]} for row in published]


def parse(argv) -> tuple[Options, Training]:
    """Parses a command line. Raises UsageError, and UserError if the dataset is missing.

    With --train_samples, the dataset is not opened, and ImageNet's number of classes is assumed.
    """
    recipes, given = recipes_first(argv[1:])
    values = flags.read(all_flags(bool(recipes)), [argv[0], *recipes, *given])
    options = flags.parsed(values, Options)
    recipe = with_image_size(flags.parsed(values, Recipe))
    workers_schedule = values.workers_schedule and sizes(values.workers_schedule)
    if workers_schedule:
        options = replace(options, workers=(max(workers_schedule.values),))
    if not options.workers:
        raise UsageError("--workers is missing; give one or more numbers of workers, such as --workers=256,1024")
    samples = values.train_samples if recipes else None
    classes = CLASSES
    if recipes and not samples:
        dataset = open_named(recipe.data_dir, label_column=recipe.label_column)
        samples = dataset.train.samples
        classes = len(dataset.classes)
    return options, Training(recipe, values.micro_batch_size, BYTES[values.compression], samples, classes,
                         workers_schedule)


def all_flags(has_recipe: bool):
    """Defines this command's own flags, and the flags of train.py that a recipe or a run's flags.txt may hold."""
    values = define(Options, borrowed=(*flags.names(Recipe), *flags.names(Launch), "train_samples"))
    values["micro_batch_size"].help = f"Images per worker and step. Default: the recipe's, or {MICRO_BATCH_SIZE}."
    values["train_samples"].help = "Number of training samples of the recipe, if its dataset is not available."
    values["precision"].help += " Default: the recipe's, or that of the topology's rates."
    if not has_recipe:
        values.set_default("model", "resnet50")
        values.set_default("precision", None)
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv))
