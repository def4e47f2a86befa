"""sweep.json and sweep.html: the runs of experiments.sweep; mean and spread over the seeds as a table and plots."""
import itertools
import math
import operator
import statistics
from collections.abc import Callable
from pathlib import Path

from common.files import write_atomically, write_json
from reporting import charts
from reporting.charts import Line, percent
from reporting.observer import top1_of
from reporting.page import details, duration, page, table

NOTE = ("± is the standard deviation over the seeds. The top-1 of a run that diverged is the accuracy of guessing. "
        "That of a run with --ema_decay is the one of the averaged weights.")
SHOWN = {"Validation top-1 after the last epoch": top1_of,
         "Highest validation top-1 of a run": operator.itemgetter("best_top1")}  # title -> value of a row


def write_sweep(folder: Path, rows: list[dict], planned: int) -> Path:
    """Writes sweep.json and sweep.html; returns the page's path.

    rows: of the runs that have ended: flags (swept flag -> value), seed, diverged, diverged_at, val_top1, ema_val_top1
    (or None), best_top1, best_epoch, seconds, folder. planned: number of runs of the whole sweep.
    """
    write_json(folder / "sweep.json", rows)
    names = list(rows[0]["flags"]) if rows else []
    path = folder / "sweep.html"
    write_atomically(path, page("Sweep", [
        f'<p class="result">{len(rows)} of {planned} runs have ended. {best(rows)}</p>', *plots(names, rows),
        "<h2>Mean and spread over the seeds</h2>", table([summarized(*one) for one in by_flags(rows)]),
        f"<p>{NOTE}</p>" if rows else "", details("All runs", table([listed(row) for row in rows]))]))
    return path


def by_flags(rows: list[dict]) -> list[tuple[dict, list[dict]]]:
    """Returns each combination of flags and its rows, one per seed, in the order of the sweep."""
    grouped = {}
    for row in rows:
        grouped.setdefault(tuple(row["flags"].items()), []).append(row)
    return [(dict(combination), group) for combination, group in grouped.items()]


def mean(rows: list[dict], value: Callable[[dict], float]) -> float:
    return statistics.fmean(map(value, rows))


def best(rows: list[dict]) -> str:
    """Returns which flags have the highest mean, as a sentence."""
    if not rows or not rows[0]["flags"]:
        return ""
    top1, flags = max(((mean(group, top1_of), flags) for flags, group in by_flags(rows)), key=lambda one: one[0])
    return f"The highest mean top-1 after the last epoch, {top1:.2%}, is that of {labelled(flags)}."


def labelled(flags: dict) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in flags.items())


def summarized(flags: dict, rows: list[dict]) -> dict:
    """Returns a line of the table: the flags, and mean and spread over the seeds."""
    shown, named = {}, {name: str(value) for name, value in flags.items()}
    for title, value in zip(("top-1", "best top-1"), SHOWN.values(), strict=True):
        values = [value(row) for row in rows]
        spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
        shown |= {title: f"{100 * mean(rows, value):.2f}{spread} %",
                  f"{title}, lowest to highest": f"{min(values):.2%} to {max(values):.2%}"}
    return named | {"seeds": len(rows), "diverged": sum(row["diverged"] for row in rows)} | shown | {
        "time of a run": duration(mean(rows, lambda row: row["seconds"]))}


def listed(row: dict) -> dict:
    """Returns a line of the table of all runs."""
    where = row["diverged_at"]
    return {name: str(value) for name, value in row["flags"].items()} | {
        "seed": row["seed"], "top-1": f"{top1_of(row):.2%}", "best top-1": f"{row['best_top1']:.2%}",
        "best epoch": "" if row["best_epoch"] is None else row["best_epoch"],
        "diverged": f"step {where['step']:,}, epoch {where['epoch']:.3f}" if where else "",
        "time": duration(row["seconds"]), "folder": row["folder"]}


def plots(names: list[str], rows: list[dict]) -> list[str]:
    """Returns plots over each swept flag that has several values: means as lines, seeds as dots."""
    drawn = [plot(title, value, name, rows) for name in names
             if len({row["flags"][name] for row in rows}) > 1 for title, value in SHOWN.items()]
    return [f'<div class="charts">{"".join(drawn)}</div>'] if drawn else []


def plot(title: str, value: Callable[[dict], float], name: str, rows: list[dict]) -> str:
    """Returns a plot over one flag, with a line for each combination of the others."""
    marks = positions({row["flags"][name]: None for row in rows})

    def others(row):
        return {other: value for other, value in row["flags"].items() if other != name}

    series, combinations = [], [flags for flags, _ in by_flags([row | {"flags": others(row)} for row in rows])]
    for colour, combination in enumerate(combinations):
        own = sorted((row for row in rows if others(row) == combination), key=lambda row: marks[row["flags"][name]])
        points = [(marks[one], list(group)) for one, group in
                  itertools.groupby(own, key=lambda row: row["flags"][name])]
        label = labelled(combination) or "mean"
        series.append(Line(label, [x for x, _ in points], [100 * mean(group, value) for _, group in points], colour))
        if len(own) > len(points):
            series.append(Line(f"{label}, single seeds", [x for x, group in points for _ in group],
                               [100 * value(row) for _, group in points for row in group], colour, "dots"))
    return charts.lines(title, name.replace("_", " "), series, show=percent,
                        x_marks=[(x, shortened(str(one))) for one, x in marks.items()])


def shortened(text: str) -> str:
    return text if len(text) <= 14 else text[:13] + "…"


def positions(values) -> dict:
    """Returns the place of each value on the horizontal axis: logarithmic for numbers above zero, else by order."""
    if all(isinstance(value, int | float) and value > 0 for value in values):
        return {value: math.log(value) for value in sorted(values)}
    return {value: place for place, value in enumerate(values)}
