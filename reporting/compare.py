"""One page that compares runs: a table of results and of the flags that differ, curves, trust ratios."""
import html
import os
from functools import partial
from pathlib import Path
from urllib.parse import quote

from common import metric
from common.errors import plural
from common.run_folder import PAGE, top1_of
from plan.values import number_or_text, same
from reporting import charts, heat_map, pairs
from reporting.charts import LOGARITHMIC, NUMBERS, PERCENT, XAxis, YAxis, number
from reporting.page import (
    Html,
    constant_values,
    details,
    duration,
    filled_columns,
    html_table,
    over_epochs_and_time,
    page,
)
from reporting.ranking import (
    LEAD,
    NOTE,
    Setting,
    best_of,
    by_lead,
    by_mean,
    differences,
    judgement,
    labelled,
    listed,
    settings,
    table,
)
from reporting.run_data import RunData, validation_set


def gap(row: dict) -> float | None:
    """Returns the generalization gap of a row of metrics.jsonl: train top-1 minus validation top-1."""
    train, validation = row.get(metric.TRAIN_TOP1), row.get(metric.VAL_TOP1)
    return None if None in (train, validation) else train - validation


def error(row: dict) -> float | None:
    """Returns 1 minus the validation top-1 that counts of a row of metrics.jsonl."""
    return None if top1_of(row) is None else 1 - top1_of(row)


CURVES = (  # title, column of metrics.jsonl or a function of its rows, axis
    ("Validation top-1", top1_of, PERCENT), ("Validation loss", metric.VAL_LOSS, LOGARITHMIC),
    ("Train loss", metric.TRAIN_LOSS, LOGARITHMIC), ("Train top-1", metric.TRAIN_TOP1, PERCENT),
    ("Generalization gap: train top-1 minus validation top-1", gap, PERCENT),
    ("Learning rate", metric.LEARNING_RATE, NUMBERS), ("Global batch size", metric.BATCH_SIZE, NUMBERS),
    ("Training throughput, images/s", metric.IMAGES_PER_SECOND, NUMBERS))
ERRORS_FROM = 0.9  # highest top-1 above which the error is drawn instead, because curves near 100 % look the same
PLANNED = (metric.LEARNING_RATE, metric.BATCH_SIZE)  # columns that may be constant, and that steps.jsonl has, too
TRAIN_TOP1 = ("The train top-1 is that of the augmented images during an epoch, while the weights change. So the "
              "generalization gap can be negative.")
WIDE = ("the paper reports", "differs from the recipe")
SHORT = ("runs", "top-1", LEAD, "peak top-1", "time", "state", WIDE[0])  # columns of the first table


def comparison(runs: list[RunData], target: float | None = None, folder: Path = Path()) -> tuple[str, str]:
    """Returns the page, and its first sentence.

    target: top-1; the table says when each run reached it. folder: of the page, for links to those of the runs.
    """
    flags = [run.flags | {"workers": str(run.workers)} for run in runs]
    differing = different_flags(flags)
    common = os.path.commonpath([run.folder.parent for run in runs])
    rows = [described(os.path.relpath(run.folder, common), run, {name: own.get(name, "") for name in differing})
            for run, own in zip(runs, flags, strict=True)]
    shown, every = settings(rows, by_folder=True), settings(
        [row | {"flags": row["every"]} for one in settings(rows) for row in one.rows])
    ended, unfinished = ([row for row in rows if row["ended"] is wanted] for wanted in (True, False))
    judged = settings(ended, by_folder=True)
    verdict = judgement(judged, [] if unfinished else shown)  # a run in progress may be the best
    said = verdict["sentence"] + (not_counted(unfinished) if unfinished else "")
    by_top1, ranked = by_lead(shown, verdict), by_mean(judged, verdict)
    results, all_runs = (table(own, partial(columns, target=target), leading)
                         for own, leading in ((by_top1, ranked), (every, ())))
    shared = [{"flag": flag, "value": value} for flag, value in flags[0].items() if flag not in differing]
    sections = [
        f'<p class="result">{html.escape(said)}</p>', "<h2>Results</h2>", differences(ranked),
        html_table(overview(by_top1, results, folder), ("state", "flags", WIDE[0]), best_of(by_top1, verdict)),
        *(pairs.of_runs(*(run.folder for run in runs)) if len(runs) == 2 else ()),
        details("All runs", html_table(all_runs, WIDE)), details("How they are ranked", f'<p class="muted">{NOTE}</p>'),
        "<h2>Curves</h2>", curves(shown), f'<p class="muted">{TRAIN_TOP1}</p>',
        *layers(rows), details(f"The {len(shared)} flags that all runs share", html_table(shared, ("value",)))]
    return page(f"Comparison of {len(runs)} runs", sections), said


def overview(shown: list[Setting], lines: list[dict], folder: Path) -> list[dict]:
    """Returns the columns of the results that fit on a screen. lines: those of `table`. folder: of the page."""
    kept = [title for title in lines[0] if title in SHORT or " to " in title]
    return filled_columns([
        {"run": linked(one.name if one.flags or len(one.rows) == 1 else "all", one, folder)}
        | {title: line[title] for title in kept}
        | {"flags": labelled({name: value for name, value in one.flags.items() if value != ""})}
        for one, line in zip(shown, lines, strict=True)])


def linked(name: str, one: Setting, folder: Path) -> Html:
    """Returns the name of a setting with links to the pages of its runs. folder: of the page that has the links."""
    pages = [quote(os.path.relpath(row["run"].folder / PAGE, folder), safe="/") for row in one.rows]
    if len(pages) == 1:
        return Html(f'<a href="{pages[0]}">{html.escape(name)}</a>')
    return Html(f"{html.escape(name)}: " + ", ".join(f'<a href="{page}">{number(index)}</a>'
                                                     for index, page in enumerate(pages, 1)))


def not_counted(unfinished: list[dict]) -> str:
    """Returns a space and a sentence on the runs that have not ended, which are not ranked."""
    names = [row["folder"] + (f" at {own.percent()} so far" if own.top1 else "")
             for row in unfinished for own in settings([row])]
    verb = "is" if len(names) == 1 else "are"
    return f" {plural(len(names), 'unfinished run')}, {listed(names)}, {verb} not counted."


def described(name: str, run: RunData, flags: dict) -> dict:
    """Returns a row for ranking.settings. flags: those that differ between the runs."""
    flags = {flag: number_or_text(value) for flag, value in flags.items()}
    return {"flags": {flag: value for flag, value in flags.items() if flag != "seed"}, "every": {"run": name, **flags},
            "folder": name, "run": run, "ended": bool(run.summary or run.divergence), "diverged": bool(run.divergence),
            metric.VAL_TOP1: top1_of(run.divergence or run.result), "validation": validation_set(run.run),
            metric.VAL_SAMPLES: None if run.divergence else run.run["dataset"]["validation_samples"],
            metric.VAL_GUESS_COUNT: run.result.get(metric.VAL_GUESS_COUNT),
            "reported": (run.run["recipe"] or {}).get("reported")}


def columns(row: dict, target: float | None) -> dict:
    """Returns the results of a run, as `table` expects them."""
    run = row["run"]
    now, best, recipe = run.result, run.best or {}, run.run["recipe"] or {}
    reported = [f"{recipe['reported']}" + f" ({recipe['row']})" * bool(recipe["row"]), run.changes or "no"] if (
        recipe.get("reported")) else ["", ""]
    epoch = run.divergence["diverged_at"]["epoch"] if run.divergence else run.epoch
    return {"peak top-1": best.get("top1", ""), "peak epoch": best.get("epoch", ""), **reached(run, target),
            "time": now.get("seconds", ""),
            "state": "" if run.summary else f"{run.state} at epoch {number(epoch)} of {number(run.epochs)}",
            "top-5": now.get(metric.VAL_TOP5, "") if run.has_top5 else "", "loss": now.get(metric.VAL_LOSS, ""),
            **{f"top-1 of the {short}": now.get(prefix + metric.VAL_TOP1, "")
               for prefix, (_, short) in metric.VARIANTS.items()},
            "images/s": now.get(metric.IMAGES_PER_SECOND) or "", **dict(zip(WIDE, reported, strict=True))}


def reached(run: RunData, target: float | None) -> dict[str, float | str]:
    """Returns the epoch and the time of the first evaluation with this top-1, as columns of the results."""
    if target is None:
        return {}
    first = next((row for row in run.rows if (top1_of(row) or 0) >= target), None)
    return {f"epochs to {target:.4g}": first["epoch"] if first else "not reached",
            f"time to {target:.4g}": duration(first["seconds"]) if first else "not reached"}


def layers(rows: list[dict]) -> list[str]:
    """Returns the trust ratios of the runs that recorded them, as heat maps on one scale."""
    recorded = [(row["folder"], row["run"]) for row in rows if row["run"].trust_ratios]
    scale = [ratio for _, run in recorded for ratios in run.trust_ratios.values() for ratio in ratios]
    drawn = [f"<h3>{html.escape(name)}</h3>"
             + heat_map.trust_ratios([row["epoch"] for row in run.layers], run.trust_ratios, scale)
             for name, run in recorded]
    return ["<h2>Layer by layer</h2>", *drawn] if drawn else []


def different_flags(runs: list[dict]) -> list[str]:
    """Returns the flags whose values differ. runs: flags and their values in each run."""
    names = dict.fromkeys(name for flags in runs for name in flags)
    return [name for name in names if not all(same(runs[0].get(name, ""), flags.get(name, "")) for flags in runs)]


def curves(shown: list[Setting]) -> str:
    """Returns the curves with one legend, and sentences on values that are the same in all runs."""
    drawn = [(row["folder"], row["run"], colour) for colour, one in enumerate(shown) for row in one.rows
             if row["run"].rows]
    rows = [row for _, run, _ in drawn for row in (*run.rows, *run.steps)]
    keys = [(one.name + f" ({len(one.rows)} runs)" * (len(one.rows) > 1), colour, "")
            for colour, one in enumerate(shown)]
    same_values = constant_values({title: [row.get(column) for _, run, _ in drawn for row in run.steps or run.rows]
                                   for title, column, _ in CURVES if column in PLANNED}, "in all runs")
    varying = [curve for curve in CURVES if curve[0] not in same_values]
    if ERRORS_FROM < max((top1_of(row) or 0 for row in rows), default=0) < 1:  # 0 errors have no logarithm
        varying[0] = "Validation error (1 - top-1)", error, YAxis(charts.percent, log=True)
    return charts.legend(keys) + over_epochs_and_time(
        rows, max((row["epoch"] for row in rows), default=0), partial(curves_over, drawn, varying)
    ) + f"<p>{' '.join(same_values.values())}</p>"


def curves_over(drawn, shown, x: XAxis) -> list[str]:
    return [charts.lines(title, x, [charts.line(name, (column in PLANNED and run.steps) or run.rows, x, column,
                                                colour=colour)
                                    for name, run, colour in drawn], y, has_legend=False)
            for title, column, y in shown]
