"""One page for several runs: a table of results and of the flags that differ, and curves on top of each other."""
import functools
import html

from reporting import charts
from reporting.charts import Line, number, percent
from reporting.page import details, duration, over_epochs_and_time, page, table
from reporting.run_data import RunData, same
from reporting.run_text import tidy

CURVES = (  # title, column of metrics.jsonl, scale, text of a value, logarithmic
    ("Validation top-1", "val_top1", 100, percent, False), ("Validation loss", "val_loss", 1, number, True),
    ("Train loss", "train_loss", 1, number, True), ("Train top-1", "train_top1", 100, percent, False),
    ("Learning rate", "learning_rate", 1, number, False), ("Global batch size", "batch_size", 1, number, False),
    ("Training throughput, images/s", "images_per_second", 1, number, False))
STATES = {True: "in progress", False: "unfinished"}


def comparison(runs: list[RunData]) -> str:
    """Returns the page."""
    names = distinct_names(runs)
    results = [result(name, run) for name, run in zip(names, runs, strict=True)]
    differing = different_flags(runs)
    flags = [{"run": name} | {flag: tidy(run.flags.get(flag, "")) for flag in differing}
             for name, run in zip(names, runs, strict=True)]
    same_flags = {flag: value for flag, value in runs[0].flags.items() if flag not in differing}
    sections = [
        f'<p class="result">{sentence(names, runs)}</p>', "<h2>Results</h2>", table(results),
        "<h2>Flags that differ</h2>", table(flags) if differing else "<p>All runs have the same flags.</p>",
        "<h2>Curves</h2>", curves(names, runs),
        details(f"The {len(same_flags)} flags that all runs share", table(
            [{"flag": f"--{flag}", "value": value} for flag, value in same_flags.items()], ("value",)))]
    return page(f"Comparison of {len(runs)} runs", sections)


def sentence(names: list[str], runs: list[RunData]) -> str:
    """Returns which run is the most accurate."""
    scored = [(run.result["val_top1"], name) for name, run in zip(names, runs, strict=True)
              if run.result.get("val_top1") is not None]
    if not scored:
        return "No run has been evaluated yet."
    top1, name = max(scored)
    return f"<b>{html.escape(name)}</b> has the highest top-1 accuracy, <b>{top1:.2%}</b>."


def result(name: str, run: RunData) -> dict:
    now, best = run.result, run.best

    def part(value):
        return "" if value is None else f"{value:.2%}"

    average = {"top-1 of the average": part(now["ema_val_top1"])} if "ema_val_top1" in now else {}
    return {
        "run": name, "state": "finished" if run.summary else STATES[run.is_in_progress],
        "top-1": part(now.get("val_top1")), "top-5": part(now.get("val_top5")), "best top-1": part(
            best and best["val_top1"]), "loss": number(now.get("val_loss")) if run.rows else ""} | average | {
        "epochs": f"{number(run.epoch)} of {number(run.epochs)}", "workers": run.workers or "",
        "batch size": now.get("global_batch_size") or now.get("batch_size") or "",
        "images/s": f"{now['images_per_second']:,.0f}" if now.get("images_per_second") is not None else "",
        "time": duration(now["seconds"]) if now.get("seconds") is not None else ""}


def different_flags(runs: list[RunData]) -> list[str]:
    """Returns the flags whose values differ between the runs."""
    names = dict.fromkeys(name for run in runs for name in run.flags)
    return [name for name in names if not all(
        same(runs[0].flags.get(name, ""), run.flags.get(name, "")) for run in runs)]


def curves(names: list[str], runs: list[RunData]) -> str:
    return over_epochs_and_time([row for run in runs for row in run.rows],
                                functools.partial(curves_over, names, runs))


def curves_over(names, runs, x_title, x) -> list[str]:
    drawn = []
    for title, column, scale, show, log in CURVES:
        series = []
        for name, run in zip(names, runs, strict=True):
            values = [row.get(column) for row in run.rows]
            series.append(Line(name, [x(row) for row in run.rows],
                               [value if value is None else value * scale for value in values]))
        drawn.append(charts.lines(title, x_title, series, log, show))
    return drawn


def distinct_names(runs: list[RunData]) -> list[str]:
    """Returns the folders' names, with as many parents as they need to differ."""
    for parts in range(1, 6):
        names = ["/".join(run.folder.parts[-parts:]) for run in runs]
        if len({*names}) == len(names):
            return names
    return [f"{number + 1}: {run.folder}" for number, run in enumerate(runs)]
