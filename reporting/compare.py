"""One page for several runs: tables of results and of the flags that differ, curves on top of each other, layers."""
import html
from functools import partial

from plan.run_folder import top1_of
from plan.values import same
from reporting import charts, heat_map
from reporting.charts import LOGARITHMIC, NUMBERS, PERCENT, XAxis, number
from reporting.page import constant_values, details, duration, filled_columns, html_table, over_epochs_and_time, page
from reporting.run_data import RunData


def gap(row: dict) -> float | None:
    """Returns the generalization gap of a row of metrics.jsonl: train top-1 minus validation top-1."""
    accuracies = row["train_top1"], row["val_top1"]
    return None if None in accuracies else accuracies[0] - accuracies[1]


CURVES = (  # title, column of metrics.jsonl or a function of its rows, axis
    ("Validation top-1", "val_top1", PERCENT), ("Validation loss", "val_loss", LOGARITHMIC),
    ("Train loss", "train_loss", LOGARITHMIC), ("Train top-1", "train_top1", PERCENT),
    ("Generalization gap: train top-1 minus validation top-1", gap, PERCENT),
    ("Learning rate", "learning_rate", NUMBERS), ("Global batch size", "batch_size", NUMBERS),
    ("Training throughput, images/s", "images_per_second", NUMBERS))
PLANNED = ("learning_rate", "batch_size")  # columns that may be constant
TRAIN_TOP1 = ("The train top-1 is that of the augmented images during an epoch, while the weights change. So the "
              "generalization gap can be negative.")


def comparison(runs: list[RunData], target: float | None = None) -> str:
    """Returns the page. target: top-1 accuracy; the page says when each run reached it."""
    runs = sorted(runs, key=lambda run: bool(run.divergence))  # these come last
    names = distinct_names(runs)
    results = [result(name, run, target) for name, run in zip(names, runs, strict=True)]
    differing = different_flags(runs)
    flags = [{"run": name} | {flag: tidy(run.flags.get(flag, "")) for flag in differing}
             for name, run in zip(names, runs, strict=True)]
    same_flags = {flag: value for flag, value in runs[0].flags.items() if flag not in differing}
    sections = [
        f'<p class="result">{sentence(names, runs)}</p>', "<h2>Results</h2>", html_table(filled_columns(results)),
        *published(names, runs), "<h2>Flags that differ</h2>",
        html_table(flags) if differing else "<p>All runs have the same flags.</p>",
        "<h2>Curves</h2>", curves(names, runs), f'<p class="muted">{TRAIN_TOP1}</p>', *layers(names, runs),
        details(f"The {len(same_flags)} flags that all runs share", html_table(
            [{"flag": f"--{flag}", "value": value} for flag, value in same_flags.items()], ("value",)))]
    return page(f"Comparison of {len(runs)} runs", sections)


def sentence(names: list[str], runs: list[RunData]) -> str:
    """Returns which run is the most accurate."""
    scored = [(top1_of(run.result), name) for name, run in zip(names, runs, strict=True)
              if top1_of(run.result) is not None]
    if not scored:
        return "No run has been evaluated yet."
    top1, name = max(scored)
    return f"<b>{html.escape(name)}</b> has the highest top-1 accuracy, <b>{top1:.2%}</b>."


def result(name: str, run: RunData, target: float | None = None) -> dict[str, str]:
    """Returns a line of the table of results. What the run lacks is empty."""
    now = run.result
    best = run.best
    top1, top5, average = (_percent(now.get(column)) for column in ("val_top1", "val_top5", "ema_val_top1"))
    top5 = top5 if run.has_top5 else ""
    where = f" at epoch {number(run.divergence['diverged_at']['epoch'])}" if run.divergence else ""
    return {
        "run": name, "state": run.state + where, "last top-1": top1, "top-5": top5,
        "peak top-1": _percent(best and best["top1"]),
        "peak epoch": number(best["epoch"]) if best else "", **reached(run, target),
        "loss": number(now.get("val_loss")) if run.rows else "", "top-1 of the average": average,
        "epochs": f"{number(run.epoch)} of {number(run.epochs)}", "workers": number(run.workers),
        "batch size": number(now.get("global_batch_size") or now.get("batch_size") or ""),
        "images/s": f"{now['images_per_second']:,.0f}" if now.get("images_per_second") else "",
        "time": duration(now["seconds"]) if now else ""}


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def reached(run: RunData, target: float | None) -> dict[str, str]:
    """Returns the epoch and the time of the first evaluation with this top-1, as columns of the results."""
    if target is None:
        return {}
    first = next((row for row in run.rows if (top1_of(row) or 0) >= target), None)
    return {f"epochs to {target:.4g}": number(first["epoch"]) if first else "not reached",
            f"time to {target:.4g}": duration(first["seconds"]) if first else "not reached"}


def published(names: list[str], runs: list[RunData]) -> list[str]:
    """Returns a table of what the papers report for the runs' recipes, next to ours."""
    listed = []
    for name, run in zip(names, runs, strict=True):
        recipe = run.run["recipe"] or {}
        columns = result(name, run)
        if recipe.get("reported"):
            listed.append({"run": name, "row": recipe["row"] or "", "the paper reports": recipe["reported"]} | {
                column: columns[column] for column in ("last top-1", "peak top-1", "time")} | {
                "differs from the recipe": run.changes or "no"})
    return ["<h2>The papers' figures</h2>", html_table(
        listed, ("the paper reports", "differs from the recipe"))] if listed else []


def layers(names: list[str], runs: list[RunData]) -> list[str]:
    """Returns the trust ratios of the runs that recorded them, as heat maps on one scale."""
    recorded = [(name, [row["epoch"] for row in run.layers], run.trust_ratios)
                for name, run in zip(names, runs, strict=True) if run.layers]
    scale = [ratio for _, _, ratios in recorded for row in ratios.values() for ratio in row]
    drawn = [f"<h3>{html.escape(name)}</h3>" + heat_map.trust_ratios(epochs, ratios, scale)
             for name, epochs, ratios in recorded if ratios]
    return ["<h2>Layer by layer</h2>", *drawn] if drawn else []


def different_flags(runs: list[RunData]) -> list[str]:
    """Returns the flags whose values differ between the runs."""
    names = dict.fromkeys(name for run in runs for name in run.flags)
    return [name for name in names if not all(
        same(runs[0].flags.get(name, ""), run.flags.get(name, "")) for run in runs)]


def curves(names: list[str], runs: list[RunData]) -> str:
    """Returns the curves with one legend, and sentences on what is the same in all runs."""
    drawn = [(name, run, colour) for name, run, colour in zip(names, runs, colours_of(runs), strict=True) if run.rows]
    rows = [row for _, run, _ in drawn for row in run.rows]
    named = {}
    for name, _, colour in drawn:
        named.setdefault(colour, []).append(name)
    keys = [(own[0] + f" and {len(own) - 1} more" * (len(own) > 1), colour, "") for colour, own in named.items()]
    same_values = constant_values({title: [row.get(column) for _, run, _ in drawn for row in (*run.rows, *run.steps)]
                                   for title, column, _ in CURVES if column in PLANNED}, "in all runs")
    shown = [curve for curve in CURVES if curve[0] not in same_values]
    return charts.legend(keys) + over_epochs_and_time(
        rows, max((row["epoch"] for row in rows), default=0), partial(curves_over, drawn, shown)
    ) + f"<p>{' '.join(same_values.values())}</p>"


def tidy(value: str) -> str:
    """Returns a flag's number without superfluous digits, other text as it is."""
    try:
        return number(float(value))
    except ValueError:
        return value


def colours_of(runs: list[RunData]) -> list[int]:
    """Returns the number of a colour for each run: the same if only the seeds differ."""
    names = [name for name in different_flags(runs) if name != "seed"]
    settings = [tuple(tidy(run.flags.get(name, "")) for name in names) for run in runs]
    return [list(dict.fromkeys(settings)).index(values) for values in settings]


def curves_over(drawn, shown, x: XAxis) -> list[str]:
    return [charts.lines(title, x, [charts.line(name, run.rows, x, column, colour=colour)
                                    for name, run, colour in drawn], y, has_legend=False)
            for title, column, y in shown]


def distinct_names(runs: list[RunData]) -> list[str]:
    """Returns the folders' names, with as many parents as they need to differ."""
    for parts in range(1, 6):
        names = ["/".join(run.folder.parts[-parts:]) for run in runs]
        if len({*names}) == len(names):
            return names
    return [f"{number + 1}: {run.folder}" for number, run in enumerate(runs)]
