"""Draws the report of a run, or compares several: `uv run python -m reporting.report RUN [RUN ...]`.

With one run, the command writes RUN/report.html again, also while the run is in progress. With several, or the folder
of several, it writes one page that compares them: peak and last accuracy next to the figures of the papers, the flags
that differ, curves over epochs and over time, the generalization gap, and trust ratios. With two evaluations (folders
of --mode=evaluate --output_dir), it compares them image by image. It prints the path of the page.
"""
import html
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from common import command, flags, metric
from common.accuracy import interval
from common.errors import UsageError, UserError, complain, plural
from common.files import write_atomically
from common.flags import flag
from common.run_folder import FLAGS, PAGE, PLAN, top1_of
from common.version import revision_text
from reporting import heat_map, pairs, sentences
from reporting.charts import number
from reporting.compare import comparison, gap
from reporting.page import Html, code, commands, details, facts, html_table, page, tiles
from reporting.run_data import RunData
from reporting.sections import curves, mistakes, noise_scale, samples, times
from reporting.sentences import in_words, rounded

RELOADS = 5, 20  # seconds; bounds of the time between two reloads
BATCH_NORM = "/gamma", "/beta"  # variables


@dataclass(frozen=True)
class Options:
    """This command's flags."""

    output: str | None = flag(None, "File to write. Default: RUN/report.html for one run, report.html for several.",
        path=True, written=True)
    target_top1: float | None = flag(None, "Validation top-1, such as 0.75. The comparison of several runs says after "
        "how many epochs and how long each run reached it.", low=0.0, high=1.0)


@command.program("reporting.report", __doc__, lambda _: flags.described(flags.define(Options)), is_alone=True)
def main(argv) -> None:
    """Runs a command line."""
    values = flags.define(Options)
    folders = flags.read_with_arguments(values, argv)
    if not folders:
        raise UsageError("give the folder of a run, such as runs/20261122-104501-resnet20-4711")
    if len(folders) == 2 and all(map(pairs.is_evaluation, folders)):
        write(Path(values.output or PAGE).absolute(), *pairs.comparison(*folders))
        return
    runs = readable([run for folder in folders for run in runs_in(Path(folder))])
    if values.target_top1 is not None and len(runs) == 1:
        raise UsageError("--target_top1 compares runs; give the folders of several")
    default = PAGE if len(runs) > 1 else runs[0].folder / PAGE
    path = Path(values.output or default).absolute()
    write(path, *(comparison(runs, values.target_top1, path.parent) if len(runs) > 1 else (report(runs[0]), "")))


def write(path: Path, content: str, answer: str) -> None:
    """Writes a page and prints its path. answer: its first sentence, for standard error, or an empty string."""
    if not path.parent.is_dir():
        raise UserError(f"--output: the folder of {path} does not exist; create it first")
    write_atomically(path, content)
    if answer:
        print(answer, file=sys.stderr)
    print(path, flush=True)


def runs_in(folder: Path) -> list[Path]:
    """Returns the runs in a folder, or the folder itself."""
    runs = [] if (folder / PLAN).exists() else sorted(plan.parent for plan in folder.glob(f"*/{PLAN}"))
    return runs or [folder]


def readable(folders: Sequence[Path]) -> list[RunData]:
    """Returns the runs in these folders, and names those that are none. Raises UserError if none is a run."""
    runs, problems = [], []
    for folder in folders:
        try:
            runs.append(RunData.read(folder))
        except UserError as problem:
            problems.append(problem)
    if problems and not runs:
        raise problems[0]
    for problem in problems:
        complain(f"left out: {problem}")
    return runs


def write_report(folder) -> Path:
    """Writes FOLDER/report.html from the files in the folder; returns its path. Raises UserError."""
    run = RunData.read(folder)
    path = run.folder / PAGE
    write_atomically(path, report(run))
    return path


def report(run: RunData) -> str:
    """Returns the page."""
    sections = [
        f'<p class="result">{sentences.result(run)}</p>', figures(run), sentences.state(run), sentences.advice(run),
        sentences.published(run), next_commands(run),
        "<h2>Curves</h2>", curves(run), *mistakes(run.outcomes, is_best=not run.is_best_last), *times(run),
        *noise_scale(run), *layers(run), *samples(run), "<h2>Plan</h2>", html_table(run.plan["phases"]), *settings(run),
        "<h2>Evaluations</h2>", details("All evaluations", html_table(run.rows)), "<h2>This run</h2>", origin(run)]
    top1 = run.best["top1"] if run.best else None
    reached = run.state if top1 is None else rounded(top1, interval(top1, sentences.validation_samples(run)))
    return page(run.folder.name, sections, reload_seconds(run), f"{reached} {run.flags['model']}, {run.folder.name}")


def evaluation_page(title: str, summary: dict, result: Sequence[str], made: dict, about: dict[str, str]) -> str:
    """Returns the page of an evaluation that is no part of a training.

    summary: of summary.json. result: lines of text. made: content of outcomes.json. about: name -> value, for the table
    at the end.
    """
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in result)
    return page(title, [evaluation_figures(summary, made), lines, *mistakes(made, "images"),
                        "<h2>This evaluation</h2>", facts(about)])


def evaluation_figures(summary: dict, made: dict) -> str:
    """Returns the most important numbers of an evaluation, large. Arguments as for `evaluation_page`."""
    samples, wide = summary[metric.VAL_SAMPLES], len(made["classes"]) >= metric.TOP5_CLASSES
    variants = {f"top-1 of the {short}": summary.get(prefix + metric.VAL_TOP1)
                for prefix, (_, short) in metric.VARIANTS.items()}
    certain = {"top-1": summary[metric.VAL_TOP1], **variants, "top-5": summary[metric.VAL_TOP5] if wide else None}
    certain = {name: value for name, value in certain.items() if value is not None}
    balanced = summary[metric.BALANCED_TOP1]
    guess = summary[metric.VAL_GUESS_COUNT] / samples
    shown = {name: rounded(value, interval(value, samples)) for name, value in certain.items()} | {
        "balanced top-1": rounded(balanced, interval(balanced, summary[metric.BALANCED_SAMPLES])),
        "guessing": rounded(guess, interval(certain["top-1"], samples)), "images": f"{samples:,}"}
    return tiles(shown, {name: sentences.in_words(value, samples) for name, value in certain.items()})


def reload_seconds(run: RunData) -> int | None:
    """Returns how often a browser reloads the page of a run in progress: about once between two evaluations."""
    if run.state != "in progress":
        return None
    between = run.rows[-1]["seconds"] / len(run.rows) if run.rows else 10
    return round(min(max(between, RELOADS[0]), RELOADS[1]))


def figures(run: RunData) -> str:
    """Returns the most important numbers, large: how good the result is, how certain, and compared with what.

    They are those of the best evaluation, whose checkpoint other commands take. The top-1 of the last stands beside.
    """
    now, samples = run.shown, sentences.validation_samples(run)
    if not now:
        return ""
    when = "last epoch" if run.is_best_last else f"best, epoch {number(now['epoch'])}"
    judged_first = sorted([("", "validation top-1"), *(
        (prefix, f"top-1 of the {short}") for prefix, (_, short) in metric.VARIANTS.items())],
        key=lambda one: one[0] != metric.EMA)
    certain = {f"{words}, {when}": now.get(prefix + metric.VAL_TOP1) for prefix, words in judged_first} | {
        f"validation top-5, {when}": now.get(metric.VAL_TOP5) if run.has_top5 else None}
    bounds = interval(now[metric.VAL_TOP1], samples)
    shown, below = ({name: show(value) for name, value in certain.items() if value is not None} for show in (
        lambda value: rounded(value, interval(value, samples)), lambda value: in_words(value, samples)))
    if not run.is_best_last:
        shown["last epoch"] = rounded(top1_of(run.result), bounds)
    if (lead := gap(now)) and lead > 0 and not sentences.mixes(run):
        shown["train minus validation"] = f"+{rounded(lead, bounds)[:-1]} points"
    label, most, of = sentences.most_frequent(run)
    if of:
        shown["guessing"] = rounded(most / of, bounds)
        below["guessing"] = f"always naming {run.outcomes['classes'][label]}"
    return tiles(shown | {"images/s": f"{run.result[metric.IMAGES_PER_SECOND]:,.0f}"}, below)


def next_commands(run: RunData) -> str:
    """Returns the commands to go on with: that which continues a run that has stopped comes first."""
    folder, kept = shlex.quote(str(run.folder)), run.folder / "checkpoints"
    program = "uv run" + f" horovodrun --gloo -np {run.workers} python" * (run.workers > 1) + " train.py"
    shown = {}
    if run.state in ("unfinished", "killed"):
        shown["Continue"] = f"{program} --flagfile={shlex.quote(str(run.folder / FLAGS))} --output_dir={folder}"
    if run.rows and kept.is_dir() and any(kept.iterdir()):
        checkpoint = shlex.quote(str(kept / "best" if (kept / "best").exists() else kept))
        shown |= {"Evaluate": f"uv run train.py --mode=evaluate --checkpoint={checkpoint}",
                  "Predict": f"uv run train.py --mode=predict --checkpoint={checkpoint} --image=FILE",
                  "Compare": f"uv run python -m reporting.report {folder} OTHER_RUN"}
    return commands(shown)


def layers(run: RunData) -> list[str]:
    """Returns the trust ratios as a heat map, and norms at the first step and the end (arXiv:1708.03888, table 4)."""
    if not run.layers:
        return []
    first = run.layers[0]["layers"]
    end = run.layers[-1]["layers"]
    listed = [{"variable": name, **norms("first step", *first[name]), **norms("end", *end[name])}
              for name in first]
    return ["<h2>Layer by layer</h2>", *trust_ratios(run),
            details("Norms of each variable, first step and end", html_table(listed))]


def trust_ratios(run: RunData) -> list[str]:
    """Returns the trust ratios over the epochs as heat maps. That of batch norm's variables is folded."""
    if not run.trust_ratios:
        return []
    without = len(run.layers[0]["layers"]) - len(run.trust_ratios)
    note = f" {plural(without, 'variable')} without a trust ratio {'is' if without == 1 else 'are'} left out."
    epochs, scale = [row["epoch"] for row in run.layers], [*chain(*run.trust_ratios.values())]
    folded = {name: ratios for name, ratios in run.trust_ratios.items() if name.endswith(BATCH_NORM)}
    rest = {name: ratios for name, ratios in run.trust_ratios.items() if name not in folded}
    maps = [heat_map.trust_ratios(epochs, ratios, scale) if ratios else "" for ratios in (rest, folded)]
    return [f"<p>The trust ratio scales the learning rate of a variable.{note if without else ''}</p>", maps[0],
            details(f"{plural(len(folded), 'variable')} of batch norm", maps[1]) if folded else ""]


def norms(when: str, weight: float | None, gradient: float | None, *ratio: float | None) -> dict:
    """Returns columns of the table of layers. when: part of their titles, which have to be distinct. ratio: or none."""
    return {f"weight norm, {when}": weight, f"gradient norm, {when}": gradient,
            f"weight / gradient, {when}": weight / gradient if weight and gradient else "",
            **{f"trust ratio, {when}": value for value in ratio}}


def settings(run: RunData) -> list[str]:
    """Returns a table of the main settings and flags, with their values and origins, and a folded one of defaults."""
    made = run.plan
    exchange = made["exchange"]
    grid = f" of {'x'.join(map(str, exchange['grid']))} workers" if exchange["grid"] else ""
    by = f", by {exchange['by']}" if exchange["by"] else ""
    planned = [{"setting": name, "value": value, "from": source} for name, value, source in (
        ("workers", made["workers"], "launch"), ("updates", made["steps"], "plan"),
        ("peak learning rate", made["peak_learning_rate"], "plan"),
        ("all-reduce", f"{exchange['allreduce']}{grid}{by}", exchange["why"]))]
    listed = sorted(({"setting": f"--{name}", "value": value, "from": run.run["origins"].get(name, "default")}
                     for name, value in run.flags.items()), key=lambda row: row["from"])
    given, rest = ([row for row in listed if (row["from"] == "default") is unset] for unset in (False, True))
    return [html_table([*planned, *given], ("value", "from")),
            details(f"{len(rest)} flags at their defaults", html_table(rest, ("value", "from")))]


def origin(run: RunData) -> str:
    """Returns a table: command, recipe, hosts, dataset, versions of the run."""
    made = run.run
    data, git = made["dataset"], made["git"]
    about = {
        "command": Html(code(made["command"])), "recipe": (made["recipe"] or {}).get("path"),
        "started": made["started"],
        "hosts": ", ".join(f"{host} ({plural(count, 'worker')})" for host, count in made["hosts"].items()),
        "dataset": data["folder"], "format": data["format"], "training images": data["train_samples"],
        "validation images": data["validation_samples"], "classes": data["classes"],
        "git revision": revision_text(git)} | made["versions"] | {
        "folder": str(run.folder), "page written": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    return facts(about)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
