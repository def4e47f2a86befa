"""The curves of a run's report, and where its time went."""
import html
import math
from functools import partial

from plan.flags import has_effect
from reporting import charts, sentences
from reporting.charts import Line, XAxis, number
from reporting.page import constant_values, details, duration, over_epochs_and_time, table
from reporting.run_data import RunData

TIMES = {"compute": "computing", "data": "waiting for data", "exchange": "exchanging gradients"}
ACCURACIES = {"train_top1": "train top-1", "val_top1": "validation top-1", "val_top5": "validation top-5",
              "ema_val_top1": "average of the weights, top-1", "ema_val_top5": "average of the weights, top-5"}
LOSSES = {"train_loss": "train", "val_loss": "validation", "ema_val_loss": "average of the weights"}
PLANNED = (  # title, column of metrics.jsonl and steps.jsonl, column of the schedule in plan.json
    ("Learning rate", "learning_rate", "learning_rate"), ("Momentum", "momentum", "momentum"),
    ("Global batch size", "batch_size", "global_batch_size"))


def curves(run: RunData) -> str:
    """Returns the curves over epochs and over time, and the values that are constant as sentences.

    The axes end at twice the epochs trained so far, so that the plan is seen ahead and the curves are large.
    """
    rows = [*run.rows, *run.steps]
    reached = max((row["epoch"] for row in rows), default=0)
    end = min(math.ceil(2 * reached) or run.epochs, run.epochs)
    planned_values = [(title, column, planned) for title, column, planned in PLANNED if has_effect(column, run.flags)]
    same = constant_values({title: [row[column] for row in run.steps or run.rows] + [
        row[planned] for row in run.plan["schedule"]] for title, column, planned in planned_values}, "throughout")
    varying = [value for value in planned_values if value[0] not in same]
    return (over_epochs_and_time(rows, end, partial(curves_over, run, varying))
            + f"<p>{' '.join(same.values())}</p>")


def curves_over(run: RunData, planned_values, x: XAxis) -> list[str]:
    """Returns the curves. planned_values: those of PLANNED to draw."""
    def present(columns):
        return [(column, label) for column, label in columns.items() if any(column in row for row in run.rows)
                and (run.has_top5 or "top5" not in column)]

    losses = [charts.line(label, run.rows, x, column, colour=colour)
              for colour, (column, label) in enumerate(present(LOSSES))]
    if run.steps:
        losses.insert(0, charts.line("train, single updates", run.steps, x, "loss", colour=0, kind="faint"))
    accuracies = [charts.line(label, run.rows, x, column) for column, label in present(ACCURACIES)]
    drawn = [charts.lines("Loss", x, losses, charts.LOGARITHMIC),
             charts.lines("Accuracy", x, accuracies, charts.PERCENT)]
    for title, column, planned in planned_values:
        series = [charts.line("as run", run.steps or run.rows, x, column, colour=0, steps=column != "learning_rate")]
        if x.title == "epoch":
            series.append(schedule(run, planned, x.end))
        drawn.append(charts.lines(title, x, series))
    speeds = [charts.line("images/s", run.rows, x, "images_per_second")]
    return [*drawn, charts.lines("Training throughput, images/s", x, speeds, charts.FROM_ZERO)]


def schedule(run: RunData, column: str, end: float) -> Line:
    """Returns a planned value up to an epoch: at whole epochs, and the learning rate also where it jumps or turns."""
    holds = column != "learning_rate"
    points = [(row["epoch"], row[column]) for row in run.plan["schedule"]]
    between = [(run.epochs, points[-1][1])] if holds else run.plan.get("learning_rate_breakpoints", [])
    epochs, values = zip(*sorted({(epoch, value) for epoch, value in points + between if epoch <= end}), strict=True)
    return Line("planned", epochs, values, colour=1, kind="dashed" if between else "dots", steps=holds)


def times(run: RunData) -> list[str]:
    """Returns where the time went, as a sentence and as bars for each evaluation that add up to 1."""
    rows = [row for row in run.times if "compute" in row]  # an evaluation without a step before it has none
    if not rows:
        return []
    means = {name: sum(row[name] for row in rows) / len(rows) for name in TIMES}
    *some, last = [f"{means[name]:.1%} to {label}" for name, label in TIMES.items()]
    parts = f"{', '.join(some)} and {last}".replace(" to", " went to", 1)
    chart = charts.stacked_bars("Step time", "epoch", [row["epoch"] for row in rows], {
        label: [row[name] for row in rows] for name, label in TIMES.items()})
    listed = table([{"epoch": row["epoch"]} | {label: f"{row[name]:.2%}" for name, label in TIMES.items()}
                    for row in rows])
    return ["<h2>Where the time went</h2>",
            f"<p>Of the time of an update, {parts}.{between_updates(run)}"
            f"{sentences.storage(run)}</p>",
            f'<div class="charts">{chart}</div>', details("Numbers", listed), *slow_workers(rows)]


def slow_workers(rows: list[dict]) -> list[str]:
    """Returns who was slow when a worker was last slow. rows: of times.jsonl."""
    named = [row for row in rows if row.get("slow")][-1:]
    return [f'<p class="status problem">At epoch {number(row["epoch"])}, {html.escape(sentence)}.</p>'
            for row in named for sentence in row["slow"]]


def between_updates(run: RunData) -> str:
    """Returns how much of the time the updates took, as a sentence, or an empty string if it is not known.

    The clock of a training starts when its network is built: loading TensorFlow is not in it.
    """
    trained = 0.0
    before = 0
    total = run.result.get("seconds")
    for row in run.rows:
        if row["images_per_second"]:
            trained += (row["samples"] - before) / row["images_per_second"]
        before = row["samples"]
    if not total or trained > total:
        return ""
    return (f" The updates took {duration(trained)} of the {duration(total)} after the network was built. The rest "
            "went to opening the data, evaluation and checkpoints.")
