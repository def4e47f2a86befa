"""sweep.json and sweep.html: the runs of experiments.sweep; mean and spread over the seeds as a table and plots."""
import html
import math
import operator
import statistics
from collections.abc import Callable
from pathlib import Path

from common.files import write_atomically, write_json
from plan.run_folder import top1_of
from reporting import charts
from reporting.charts import Line, XAxis
from reporting.heat_map import shortened
from reporting.page import details, duration, grouped, html_table, page

SPREAD = "± is the standard deviation over the seeds."
SINGLE = "There is a single seed of each setting."
NOTE = ("The top-1 of a run that diverged is the accuracy of guessing. That of a run with --ema_decay is the one of "
        "the averaged weights.")
RATE = "learning_rate"
SHOWN = {"Validation top-1 after the last epoch": top1_of,
         "Highest validation top-1 of a run": operator.itemgetter("best_top1")}  # title -> value of a row


def write_sweep(folder: Path, rows: list[dict], planned: int | None, problem: str = "") -> Path:
    """Writes sweep.json and sweep.html; returns the page's path.

    rows: of the runs that have ended: flags (swept flag -> value), seed, diverged, diverged_at, val_top1, ema_val_top1
    (or None), best_top1, best_epoch, seconds, folder, reported (what the paper of the recipe reports, or None). Rows
    may have different flags. planned: number of runs of the whole sweep, or None if it searches, so that some
    combinations have one seed and others all. problem: why a run failed, which ended the sweep.
    """
    write_json(folder / "sweep.json", rows)
    ended = f"{len(rows)} runs have ended" if planned is None else f"{len(rows)} of {planned} runs have ended"
    path = folder / "sweep.html"
    rows = in_order(rows)
    single = all(len(group) == 1 for _, group in by_flags(rows))
    summary = [in_columns(rows, flags) | summarized(group) | paper(rows, group[0]) for flags, group in by_flags(rows)]
    every = [in_columns(rows, row["flags"]) | listed(row) | paper(rows, row) for row in rows]
    write_atomically(path, page("Sweep", [
        f'<p class="result">{ended}. {best(rows, planned is None)}</p>',
        f'<div class="status problem"><b>Stopped</b>: {html.escape(problem)}</div>' if problem else "", *plots(rows),
        f"<h2>{'Single seeds' if single else 'Mean and spread over the seeds'}</h2>", html_table(summary),
        f"<p>{SINGLE if single else SPREAD} {NOTE}</p>" if rows else "",
        details("All runs", html_table(every))]))
    return path


def in_order(rows: list[dict]) -> list[dict]:
    """Returns the rows in the order of their flags: numbers by value, after them other values as they first occur."""
    names = names_in(rows)
    occurring = [value for row in rows for value in row["flags"].values()]

    def key(row):
        values = [row["flags"].get(name, -math.inf) for name in names]
        return [(0, value) if isinstance(value, int | float) else (1, occurring.index(value)) for value in values]

    return sorted(rows, key=key)


def by_flags(rows: list[dict]) -> list[tuple[dict, list[dict]]]:
    """Returns each combination of flags and its rows, one per seed, in the order of the sweep."""
    return [(dict(flags), group) for flags, group in grouped(rows, lambda row: tuple(row["flags"].items())).items()]


def mean(rows: list[dict], value: Callable[[dict], float]) -> float:
    return statistics.fmean(map(value, rows))


def best(rows: list[dict], searched: bool) -> str:
    """Returns which flags have the highest mean, as a sentence. searched: only those with all seeds count."""
    if not rows or not rows[0]["flags"]:
        return ""
    groups = by_flags(rows)
    seeds = max(len(group) for _, group in groups) if searched else 1
    top1, flags = max(((mean(group, top1_of), flags) for flags, group in groups if len(group) >= seeds),
                      key=operator.itemgetter(0))
    average = "mean " if any(len(group) > 1 for _, group in groups) else ""
    return f"The highest {average}top-1 after the last epoch, {top1:.2%}, is that of {labelled(flags)}."


def labelled(flags: dict) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in flags.items())


def names_in(rows: list[dict]) -> list[str]:
    """Returns the flags of all rows, in the order of their first occurrence."""
    return list(dict.fromkeys(name for row in rows for name in row["flags"]))


def in_columns(rows: list[dict], flags: dict) -> dict[str, str]:
    """Returns the first columns of a table: a combination's value of each flag that any row has."""
    return {name: str(flags.get(name, "")) for name in names_in(rows)}


def paper(rows: list[dict], row: dict) -> dict[str, str]:
    """Returns the column of what the paper reports, if it reports something of any row."""
    return {"the paper reports": row.get("reported") or ""} if any(other.get("reported") for other in rows) else {}


def summarized(rows: list[dict]) -> dict:
    """Returns mean and spread over the seeds, for a line of a table."""
    shown = {}
    for title, value in zip(("top-1", "best top-1"), SHOWN.values(), strict=True):
        values = [value(row) for row in rows]
        spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
        shown |= {title: f"{100 * mean(rows, value):.2f}{spread} %",
                  f"{title}, lowest to highest": f"{min(values):.2%} to {max(values):.2%}"}
    return {"seeds": len(rows), "diverged": sum(row["diverged"] for row in rows)} | shown | {
        "time of a run": duration(mean(rows, lambda row: row["seconds"]))}


def listed(row: dict) -> dict:
    """Returns the result of a run, for a line of a table."""
    where = row["diverged_at"]
    return {"seed": row["seed"], "top-1": f"{top1_of(row):.2%}", "best top-1": f"{row['best_top1']:.2%}",
            "best epoch": "" if row["best_epoch"] is None else row["best_epoch"],
            "diverged": f"step {where['step']:,}, epoch {where['epoch']:.3f}" if where else "",
            "time": duration(row["seconds"]), "folder": row["folder"]}


def plots(rows: list[dict]) -> list[str]:
    """Returns plots over each flag that tells runs apart: means as lines, seeds as dots."""
    drawn = "".join(plot(title, value, name, rows)
                    for name in names_in(rows) if name == RATE or name in telling(without_rate(rows))
                    for title, value in SHOWN.items())
    return [f'<div class="charts">{drawn}</div>'] if drawn else []


def without_rate(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row["flags"].items() if name != RATE} for row in rows]


def telling(combinations: list[dict], kept: str | None = None) -> list[str]:
    """Returns the fewest flags, and `kept`, that tell the combinations apart. The other flags follow from them."""
    names = list(dict.fromkeys(name for flags in combinations for name in flags))

    def distinct(names):
        return len({tuple(flags.get(name) for name in names) for flags in combinations})

    most = distinct(names)
    for name in reversed(names):
        fewer = [other for other in names if other != name]
        if name != kept and distinct(fewer) == most:
            names = fewer
    return names


def plot(title: str, value: Callable[[dict], float], name: str, rows: list[dict]) -> str:
    """Returns a plot over one flag, with a line for each combination of the others, or "" if no line has two points.

    Over a flag other than the learning rate, it shows the best learning rate of each combination, as in figure 3 of
    arXiv:1708.03888: among those with the most seeds, because a search trains only the best one with all of them.
    """
    rows = [row for row in rows if name in row["flags"]]
    others = [other for other in telling(without_rate(rows), kept=name) if other != name]
    marks = positions({row["flags"][name]: None for row in rows})
    points = {}  # other flags -> value of this flag -> the seeds of each learning rate
    for flags, group in by_flags(rows):
        line = tuple((other, flags[other]) for other in others if other in flags)
        points.setdefault(line, {}).setdefault(flags[name], []).append(group)
    if all(len(own) < 2 for own in points.values()):
        return ""
    best_of = ", best learning rate" if name != RATE and any(RATE in row["flags"] for row in rows) else ""
    series = []
    for colour, (line, own) in enumerate(points.items()):
        shown = [(marks[setting], max(own[setting], key=lambda group: (len(group), mean(group, value))))
                 for setting in sorted(own, key=marks.get)]
        has_seeds = any(len(group) > 1 for _, group in shown)
        label = (labelled(dict(line)) or ("mean" if has_seeds else "single seeds")) + best_of
        series.append(Line(label, [x for x, _ in shown], [mean(group, value) for _, group in shown], colour))
        if has_seeds:
            every = f"{label}, single seeds".removeprefix("mean, ")
            series.append(Line(every, [x for x, group in shown for _ in group],
                               [value(row) for _, group in shown for row in group], colour, "dots"))
    texts = [(position, shortened(str(setting))) for setting, position in marks.items()]
    return charts.lines(title, XAxis(name.replace("_", " "), marks=texts), series, charts.PERCENT)


def positions(values) -> dict:
    """Returns each value's position on the horizontal axis: logarithmic for numbers above zero, else by order."""
    if all(isinstance(value, int | float) and value > 0 for value in values):
        return {value: math.log(value) for value in sorted(values)}
    return {value: position for position, value in enumerate(values)}
