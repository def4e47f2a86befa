"""Draws the report of a run, or compares several: `uv run python -m reporting.report RUN [RUN ...]`.

With one run, the command writes RUN/report.html again, also while the run is in progress. With several, or the folder
of several, it writes one page that compares them: peak and last accuracy next to the figures of the papers, the flags
that differ, curves over epochs and over time, the generalization gap, and trust ratios. It prints the path of the page.
"""
import base64
import functools
import html
import math
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common import command, flags
from common.errors import UsageError, UserError
from common.files import write_atomically
from common.flags import flag
from optim import OPTIMIZERS
from reporting import charts, heat_map, sentences
from reporting.charts import Line, number, percent
from reporting.compare import comparison
from reporting.noise_scale import noise_scale
from reporting.page import constant_values, details, duration, facts, over_epochs_and_time, page, plural, table, tiles
from reporting.run_folder import COLUMNS, PAGE, PLAN, ROWS, SAMPLES, RunData

TIMES = {"compute": "computing", "data": "waiting for data", "exchange": "exchanging gradients"}
ACCURACIES = {"train_top1": "train top-1", "val_top1": "validation top-1", "val_top5": "validation top-5",
              "ema_val_top1": "average of the weights, top-1", "ema_val_top5": "average of the weights, top-5"}
LOSSES = {"train_loss": "train", "val_loss": "validation", "ema_val_loss": "average of the weights"}
PLANNED = (  # title, column of metrics.jsonl and steps.jsonl, column of the schedule in plan.json
    ("Learning rate", "learning_rate", "learning_rate"), ("Momentum", "momentum", "momentum"),
    ("Global batch size", "batch_size", "global_batch_size"))
MOST_PAIRS = 15  # confused pairs of classes
RELOADS = 5, 60  # seconds, at least and at most
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


@dataclass(frozen=True)
class Options:
    """This command's flags.

    output: File to write. Default: RUN/report.html for one run, report.html for several.
    target_top1: Validation top-1, such as 0.75. The comparison of several runs says after how many epochs and how long
        each run reached it.
    """

    output: str | None = None
    target_top1: float | None = flag(low=0.0, high=1.0)


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    if command.asks_for_help(argv):
        command.print_help(__doc__, *flags.described(flags.define(Options), flags.names(Options)))
        return 0
    with command.shell("reporting.report") as ending:
        values = flags.define(Options)
        values.set_gnu_getopt(True)  # flags may follow the folders
        folders = flags.read_with_arguments(values, argv)
        if not folders:
            raise UsageError("give the folder of a run, such as runs/20261122-104501-resnet20-4711")
        runs = [RunData.read(run) for folder in folders for run in runs_in(Path(folder))]
        if values.target_top1 is not None and len(runs) == 1:
            raise UsageError("--target_top1 compares runs; give the folders of several")
        default = PAGE if len(runs) > 1 else runs[0].folder / PAGE
        path = Path(values.output or default).absolute()
        if not path.parent.is_dir():
            raise UserError(f"--output: the folder of {path} does not exist; create it first")
        write_atomically(path, comparison(runs, values.target_top1) if len(runs) > 1 else report(runs[0]))
        print(path, flush=True)
    return ending.code


def runs_in(folder: Path) -> list[Path]:
    """Returns the runs in a folder, in the order of the numbers in their names, or the folder itself."""
    def by_numbers(run: Path) -> list:
        return [float(part) if place % 2 else part for place, part in enumerate(NUMBER.split(run.name))]

    found = [] if (folder / PLAN).exists() else [plan.parent for plan in folder.glob(f"*/{PLAN}")]
    return sorted(found, key=by_numbers) or [folder]


def write_report(folder) -> Path:
    """Writes FOLDER/report.html from the files in the folder; returns its path. Raises UserError."""
    run = RunData.read(folder)
    path = run.folder / PAGE
    write_atomically(path, report(run))
    return path


def report(run: RunData) -> str:
    """Returns the page."""
    sections = [
        f'<p class="result">{sentences.result(run)}</p>', sentences.published(run), sentences.state(run), figures(run),
        "<h2>Curves</h2>", curves(run), *times(run), *noise_scale(run), *layers(run), *mistakes(run), *samples(run),
        "<h2>Plan</h2>", phases(run), *settings(run),
        "<h2>Evaluations</h2>", details("All evaluations", table(run.rows)), "<h2>This run</h2>", origin(run)]
    return page(run.name, sections, reload_seconds(run))


def reload_seconds(run: RunData) -> int | None:
    """Returns how often a browser reloads the page of a run in progress: about once between two evaluations."""
    if run.state != "in progress":
        return None
    between = run.rows[-1]["seconds"] / len(run.rows) if run.rows and run.rows[-1].get("seconds") else 10
    return round(min(max(between, RELOADS[0]), RELOADS[1]))


def figures(run: RunData) -> str:
    """Returns the most important numbers, large."""
    now, best = run.result, run.best
    if not now:
        return ""
    shown = {"validation top-1": now.get("val_top1"),
             "validation top-5": now.get("val_top5") if run.has_top5 else None,
             "top-1 of the average": now.get("ema_val_top1")}
    if best:
        shown[f"best top-1, epoch {number(best['epoch'])}"] = best["top1"]
    shown = {name: f"{value:.2%}" for name, value in shown.items() if value is not None}
    shown["validation loss"] = number(now.get("val_loss"))
    if now.get("images_per_second") is not None:
        shown["images/s"] = f"{now['images_per_second']:,.0f}"
    return tiles(shown | {"time": duration(now["seconds"])})


def curves(run: RunData) -> str:
    """Returns the curves over epochs and over time, and the values that are constant as sentences.

    The axes end at twice the epochs trained so far, so that the plan is seen ahead and the curves are large.
    """
    rows = [*run.rows, *run.steps]
    reached = max((row["epoch"] for row in rows), default=0)
    info = OPTIMIZERS.get(run.flags["optimizer"])
    read = [one for one in PLANNED if one[1] != "momentum" or not info or "momentum" in info.options]
    same = constant_values({title: [row[column] for row in run.steps or run.rows] + [
        row[planned] for row in run.plan["schedule"]] for title, column, planned in read}, "throughout")
    return over_epochs_and_time(rows, min(math.ceil(2 * reached) or run.epochs, run.epochs), functools.partial(
        curves_over, run, [one for one in read if one[0] not in same])) + f"<p>{' '.join(same.values())}</p>"


def curves_over(run: RunData, planned_values, x_title: str, x, x_end: float) -> list[str]:
    """Returns the curves. planned_values: those of PLANNED to draw. x, x_end: see over_epochs_and_time."""
    def present(columns):
        return [(column, label) for column, label in columns.items() if any(column in row for row in run.rows)
                and (run.has_top5 or "top5" not in column)]

    losses = [charts.line(label, run.rows, x, column, colour=colour)
              for colour, (column, label) in enumerate(present(LOSSES))]
    if run.steps:
        losses.insert(0, charts.line("train, single updates", run.steps, x, "loss", colour=0, kind="faint"))
    accuracies = [charts.line(label, run.rows, x, column, 100) for column, label in present(ACCURACIES)]
    drawn = [charts.lines("Loss", x_title, losses, log=True, x_end=x_end),
             charts.lines("Accuracy", x_title, accuracies, show=percent, x_end=x_end)]
    for title, column, planned in planned_values:
        series = [charts.line("as run", run.steps or run.rows, x, column, colour=0, steps=column != "learning_rate")]
        if x_title == "epoch":
            series.append(schedule(run, planned, x_end))
        drawn.append(charts.lines(title, x_title, series, x_end=x_end))
    speeds = [charts.line("images/s", run.rows, x, "images_per_second")]
    return [*drawn, charts.lines("Training throughput, images/s", x_title, speeds, x_end=x_end, from_zero=True)]


def schedule(run: RunData, column: str, end: float) -> Line:
    """Returns a planned value up to an epoch: at whole epochs, and the learning rate also where it jumps or turns."""
    points, holds = [(row["epoch"], row[column]) for row in run.plan["schedule"]], column != "learning_rate"
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
    return [f'<p class="status problem">At epoch {number(row["epoch"])}, {html.escape(one)}.</p>'
            for row in named for one in row["slow"]]


def between_updates(run: RunData) -> str:
    """Returns how much of the whole time the updates took, as a sentence, or an empty string if it is not known."""
    trained, before, total = 0.0, 0, run.result.get("seconds")
    for row in run.rows:
        if row["images_per_second"]:
            trained += (row["samples"] - before) / row["images_per_second"]
        before = row["samples"]
    if not total or trained > total:
        return ""
    return (f" The updates took {duration(trained)} of {duration(total)}. The rest went to evaluation, checkpoints and "
            "starting.")


def layers(run: RunData) -> list[str]:
    """Returns trust ratios as a heat map, and table 4 of arXiv:1708.03888 for the first step and the end of the run."""
    if not run.layers:
        return []
    first, end = run.layers[0]["layers"], run.layers[-1]["layers"]
    listed = [{"variable": name, **norms("first step", *first[name]), **norms("end", *end.get(name, [None] * 3))}
              for name in first]
    shown, without = [], len(first) - len(run.trust_ratios)
    if run.trust_ratios:
        note = f" {plural(without, 'variable')} without a trust ratio {'is' if without == 1 else 'are'} left out."
        shown = [f"<p>The trust ratio scales the learning rate of a variable.{note if without else ''}</p>",
                 heat_map.trust_ratios([row["epoch"] for row in run.layers], run.trust_ratios)]
    return ["<h2>Layer by layer</h2>", *shown, details("Norms and trust ratios, first step and end", table(listed))]


def norms(when: str, weight: float | None, gradient: float | None, ratio: float | None) -> dict:
    """Returns columns of the table of layers. The names say when, because table() needs each once."""
    return {f"weight norm, {when}": weight, f"gradient norm, {when}": gradient,
            f"weight / gradient, {when}": weight / gradient if weight and gradient else "",
            f"trust ratio, {when}": ratio}


def mistakes(run: RunData) -> list[str]:
    """Returns the confusion of the classes and the worst errors at the last evaluation."""
    made = run.outcomes
    if not made:
        return []
    classes, counts = made["classes"], {(label, predicted): count for label, predicted, count in made["confusion"]}
    wrong = {pair: count for pair, count in counts.items() if pair[0] != pair[1]}
    total, missed = sum(counts.values()), sum(wrong.values())
    drawn = [f"<h2>Errors</h2><p>After epoch {number(made['epoch'])}, {missed:,} of {total:,} validation images are "
             "classified wrongly.</p>", '<div class="side">']
    if len(classes) <= heat_map.MOST_CLASSES:
        drawn.append(heat_map.confusion(classes, counts))
    pairs = sorted(wrong.items(), key=lambda one: -one[1])[:MOST_PAIRS]
    of_class = {label: sum(count for (one, _), count in counts.items() if one == label) for (label, _), _ in pairs}
    listed = [{"true class": classes[label], "predicted as": classes[predicted], "images": count,
               "of the class": f"{count / of_class[label]:.1%}"} for (label, predicted), count in pairs]
    if listed:
        listed = table(listed, ("true class", "predicted as"))
        drawn.append(f"<div><h3>Classes that are confused most</h3>{listed}</div>")
    return [*drawn, "</div>", *worst(made)]


def worst(made: dict) -> list[str]:
    """Returns the wrongly classified images with the highest losses."""
    shown = []
    for one in made["worst"]:
        label, predicted = (html.escape(made["classes"][one[name]]) for name in ("label", "predicted"))
        small = ' class="pixels"' if one["width"] < 64 else ""
        shown.append(f'<figure><img{small} src="{one["image"]}" alt="{label}, predicted as {predicted}" '
                     f'title="{html.escape(one["name"])}"><figcaption><b>{label}</b>, predicted as <b>{predicted}</b>, '
                     f"loss {number(one['loss'])}<br><span class=\"muted\">"
                     f"{html.escape(one['name'].rpartition('/')[2])}</span></figcaption></figure>")
    return ["<h3>Worst errors</h3><p>The wrongly classified images with the highest losses.</p>"
            f'<div class="pictures">{"".join(shown)}</div>'] if shown else []


def samples(run: RunData) -> list[str]:
    """Returns some training images as the model sees them."""
    picture = run.folder / SAMPLES
    if not picture.is_file():
        return []
    source = f"data:image/jpeg;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    after = html.escape(run.flags.get("augmentation", "none"))
    names = run.run.get("sample_classes") or ["training image"] * COLUMNS * ROWS  # of an earlier version
    cut = [f'<figure><div role="img" aria-label="{html.escape(name)}" style="background-position:'
           f'{100 * (place % COLUMNS) / (COLUMNS - 1):.2f}% {100 * (place // COLUMNS) / (ROWS - 1):.2f}%"></div>'
           f"<figcaption>{html.escape(name)}</figcaption></figure>" for place, name in enumerate(names)]
    return ["<h2>Training images</h2>", f"<p>The first images of the training, after augmentation '{after}'.</p>",
            f'<div class="pictures cut" style="--all:url({source});--size:{100 * COLUMNS}% {100 * ROWS}%">'
            f'{"".join(cut)}</div>']


def phases(run: RunData) -> str:
    """Returns the phases of the plan as a table, with the lists that plan.json keeps outside of them."""
    listed = [dict(phase) for phase in run.plan.get("phases", [])]
    for name in ("batch_norm_span", "image_size"):
        values = run.plan.get(name) or []
        for phase, value in zip(listed, values, strict=False):
            phase[name] = "the model's own" if value is None else value
    return table(listed)


def settings(run: RunData) -> list[str]:
    """Returns what workers and plan make of the flags, and each flag: its value and where it comes from.

    Flags at their defaults are shown on request. A run of an earlier version does not know which these are.
    """
    made, exchange, origins = run.plan, run.plan.get("exchange") or {}, run.run.get("origins")
    grid = f" of {'x'.join(map(str, exchange['grid']))} workers" if exchange.get("grid") else ""
    by = f", by {exchange['by']}" if exchange.get("by") else ""
    planned = [{"setting": name, "value": value, "from": source} for name, value, source in (
        ("workers", made["workers"], "launch"), ("updates", made["steps"], "plan"),
        ("peak learning rate", made["peak_learning_rate"], "plan"),
        ("all-reduce", f"{exchange.get('allreduce', 'none')}{grid}{by}", exchange.get("why", "")))]
    listed = sorted(({"setting": f"--{name}", "value": value,
                      "from": "" if origins is None else origins.get(name, "default")}
                     for name, value in run.flags.items()), key=lambda row: row["from"])
    given, rest = ([row for row in listed if (row["from"] == "default") is unset] for unset in (False, True))
    return [table([*planned, *given], ("value", "from")),
            details(f"{len(rest)} flags at their defaults", table(rest, ("value", "from"))) if rest else ""]


def origin(run: RunData) -> str:
    """Returns what the run was made with and on."""
    made = run.run
    data, git, recipe = (made.get(name) or {} for name in ("dataset", "git", "recipe"))
    revision = f"{git['revision']}{', with uncommitted changes' if git.get('changed') else ''}" if git else None
    about = {
        "command": made.get("command"), "recipe": recipe.get("path"), "started": made.get("started"),
        "hosts": ", ".join(f"{host} ({plural(count, 'worker')})" for host, count in made.get("hosts", {}).items()),
        "dataset": data.get("folder"), "format": data.get("format"),
        "training images": data.get("train_samples", run.plan.get("train_samples")),
        "validation images": data.get("validation_samples", run.result.get("val_samples")),
        "classes": data.get("classes"), "git revision": revision} | made.get("versions", {}) | {
        "folder": str(run.folder), "page written": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    return facts(about)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
