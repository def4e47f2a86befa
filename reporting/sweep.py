"""sweep.json, best.json and sweep.html: the runs of experiments.sweep, what they say, and plots."""
import html
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from common.errors import one_line
from common.files import write_atomically, write_json
from common.run_folder import PAGE
from reporting import charts
from reporting.charts import Line, XAxis
from reporting.heat_map import shortened
from reporting.page import Html, commands, details, duration, html_table, page, prose
from reporting.ranking import (
    NOTE,
    RATE,
    Setting,
    best_of,
    by_lead,
    by_mean,
    differences,
    judgement,
    labelled,
    names_in,
    settings,
    table,
    telling,
    unranked,
)

ROWS = "sweep.json"
KEY = (f"Vertical lines are 95% intervals, and rings single seeds. Of more than {charts.COLOURS} lines in a plot, the "
       "best are in colour.")


def write_sweep(folder: Path, rows: list[dict], planned: int | None, problem: str = "") -> Path:
    """Writes sweep.json, best.json and sweep.html; returns the page's path.

    rows: of the runs that have ended, which may have different flags: `flags` (swept flag -> value), `seed`, `folder`,
        `diverged`, `final` (False for a run of a search, which does not count), and the fields of
        experiments.trainings.Result
    planned: number of runs of the whole sweep, or None if it searches
    problem: why a run failed, which ended the sweep
    """
    write_json(folder / ROWS, rows)
    ended = f"{len(rows)} runs have ended" if planned is None else f"{len(rows)} of {planned} runs have ended"
    ended += time_left(rows, planned)
    path = folder / "sweep.html"
    said, _, results = judged(rows)
    write_json(folder / "best.json", said)
    command = said.get("command")
    write_atomically(path, page(f"Sweep {folder.name}", [
        f'<p class="result">{ended}. {html.escape(said["sentence"]) if rows else ""}</p>',
        f'<div class="status problem"><b>Stopped</b>: {html.escape(problem)}</div>' if problem else "",
        *(f"<p>{prose(one)}</p>" for one in shared_advice(rows)),
        commands({"The highest": command} if command else {}), *results]))
    return path


def time_left(rows: list[dict], planned: int | None) -> str:
    """Returns how long the runs that have not ended take one after another, or an empty string if that is unknown."""
    if not rows or not planned or planned <= len(rows):
        return ""
    return f", about {duration(statistics.fmean(row['seconds'] for row in rows) * (planned - len(rows)))} left"


def shared_advice(rows: list[dict]) -> list[str]:
    """Returns the advice that all runs share which have not diverged."""
    found = [row.get("advice") or [] for row in rows if not row.get("diverged")]
    return [one for one in (found or [[]])[0] if all(one in other for other in found)]


def judged(rows: list[dict]) -> tuple[dict, list[dict[str, str]], list[str]]:
    """Returns (content of best.json, lines of the table of results, sections of the page with the results).

    After an error here, the sentence in best.json names it, and the sweep continues.
    """
    try:
        finals = [row for row in rows if row.get("final", True)]
        every = [row | {"flags": {"run": row["folder"], **row["flags"], "seed": row["seed"]}}
                 for one in settings(rows) for row in one.rows]
        shown, candidates = settings(rows), settings(finals)
        said = judgement(candidates, shown)
        shown, ranked = by_lead(shown, said), by_mean(candidates, said)
        lines = summary(shown, ranked)
        if said["best"]:
            said["command"] = next(row for row in finals if row["flags"] == said["best"][0]).get("command", "")
        linked = [line | {"reports by seed": Html(", ".join(
            f'<a href="{quote(row["folder"], safe="")}/{PAGE}">{row["seed"]}</a>' for row in one.rows))}
            for line, one in zip(lines, shown, strict=True)]
        drawn = plots(rows)
        return said, lines, [
            f'<div class="charts large">{drawn}</div>', f'<p class="muted">{KEY}</p>' * bool(drawn), "<h2>Results</h2>",
            differences(ranked),
            html_table(linked, best=best_of(shown, said)),
            details("All runs", html_table(summary(settings(every)))),
            details("How they are ranked", f'<p class="muted">{NOTE}</p>') if rows else ""]
    except Exception as error:
        problem = f"The results could not be judged ({type(error).__name__}: {one_line(error)}); sweep.json has them."
        return unranked(problem), [], []


def summary(shown: Sequence[Setting], ranked: Sequence[Setting] = ()) -> list[dict[str, str]]:
    """Returns the lines of the table of results. ranked: as in ranking.table."""
    return table(shown, lambda row: {
        "diverged": f"{'below --expect ' if row.get('below_expected') else ''}at epoch "
                    f"{row['diverged_at']['epoch']:.3f}" if row["diverged_at"] else "",
        "best top-1": row["best_top1"], "best epoch": "" if row["best_epoch"] is None else row["best_epoch"],
        "time": row["seconds"], "the paper reports": row.get("reported") or ""}, ranked)


def plots(rows: list[dict]) -> str:
    """Returns a plot over each flag whose values distinguish runs: means as lines, single seeds as dots."""
    return "".join(plot(name, rows) for name in names_in(rows) if name == RATE or name in telling(without_rate(rows)))


def without_rate(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row["flags"].items() if name != RATE} for row in rows]


def plot(name: str, rows: list[dict]) -> str:
    """Returns a plot over one flag, with a line for each combination of the others, or "" if no line has two points.

    Over a flag other than the learning rate, each point has the best learning rate of its combination, as in figure 3
    of arXiv:1708.03888. Only rates with the most seeds compete, because --search_rate trains the best one alone with
    all seeds.
    """
    rows = [row for row in rows if name in row["flags"]]
    others = [other for other in telling(without_rate(rows), kept=name) if other != name]
    x_of = positions({one.flags[name]: None for one in settings(rows)})
    points = {}  # other flags -> value of this flag -> the settings with each learning rate
    for one in settings(rows):
        line = tuple((other, one.flags[other]) for other in others if other in one.flags)
        points.setdefault(line, {}).setdefault(one.flags[name], []).append(one)
    if all(len(own) < 2 for own in points.values()):
        return ""
    best_of = ", best learning rate" if name != RATE and any(RATE in row["flags"] for row in rows) else ""
    drawn = {line: [(x_of[value], max(own[value], key=lambda one: (len(one.rows), *one.rank)))
                    for value in sorted(own, key=x_of.get)] for line, own in points.items()}
    first = sorted(drawn, key=lambda line: max(one.rank for _, one in drawn[line]), reverse=True)[:charts.COLOURS]
    series = []
    for line in sorted(drawn, key=lambda line: line in first):  # those in colour above the grey ones
        is_grey = line not in first
        colour = 0 if is_grey else [one for one in drawn if one in first].index(line)
        series += series_of(labelled(dict(line)), best_of, drawn[line], colour, is_grey)
    axis = XAxis(name.replace("_", " "), ticks=[(x, shortened(str(value))) for value, x in x_of.items()])
    return charts.lines("Validation top-1 after the last epoch", axis, series, charts.PERCENT)


def series_of(label: str, best_of: str, shown: list[tuple[float, Setting]], colour: int, is_grey: bool) -> list[Line]:
    """Returns a line of a plot: the means, and unless it is grey their intervals and the single seeds.

    label: its flags. best_of: end of its label. shown: (x, setting) of each point.
    """
    has_seeds = any(len(one.rows) > 1 for _, one in shown)
    label = (label or ("mean" if has_seeds else "single seeds")) + best_of
    means = Line(label, [x for x, _ in shown], [one.mean for _, one in shown], colour)
    if is_grey:
        return [replace(means, kind="rest", has_key=False)]
    bars = [(x, bound) for x, one in shown for bound in (*(max(0.0, min(1.0, end)) for end in one.interval), None)]
    dots = [(x, top1) for x, one in shown for top1 in one.top1] if has_seeds else []
    name = f"{label}, ".removeprefix("mean, ")
    return [means, Line(f"{name}95% interval", *zip(*bars, strict=True), colour, "interval", has_key=False),
            *([Line(f"{name}single seeds", *zip(*dots, strict=True), colour, "dots", has_key=False)] if dots else [])]


def positions(values) -> dict:
    """Returns value -> x: the logarithm if all values are numbers above 0, otherwise the index."""
    if all(isinstance(value, int | float) and value > 0 for value in values):
        return {value: math.log(value) for value in sorted(values)}
    return {value: position for position, value in enumerate(values)}
