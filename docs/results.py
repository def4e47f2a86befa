"""Writes the tables of docs/results.md from the runs in docs/results/, and draws their curves.

    uv run --group benchmark python -m docs.results

docs/results/published/NAME/seedN is what is kept of a run that was trained to its end: run.json, summary.json and
metrics.jsonl, processor_seconds.txt with the user and system seconds of each start, and evaluation.json where it was
evaluated with more views. large_batch/NAME/seedN has the first four files, large_batch/search.jsonl the command and the
top-1 of each trial that chose their rates and momenta, and large_batch/longer.jsonl those of trials as long as the
runs. same_bits has the first three files of two runs with the same settings, of which one was disturbed.
"""
import json
import re
import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from common.flags import default_text
from common.run_folder import METRICS, RunFolder
from docs.drawing import save
from plan.flags import define
from plan.recipes import flags_in, read

FOLDER = Path(__file__).parent / "results"
DOCUMENT, FIGURE = FOLDER.with_suffix(".md"), FOLDER.with_suffix(".svg")
PUBLISHED, LARGE_BATCH, SAME_BITS = (FOLDER / name for name in ("published", "large_batch", "same_bits"))
TABLE = re.compile(r"(<!-- (table|bits|rules|search|longer) -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEADER = ("recipe", "published", "ours, mean", "each seed", "with views, mean", "each seed with views",
          "processor hours", "commit")
HEADER_OF_RULES = ("rule", "epochs", "learning rate", "momentum", "top-1, mean", "each seed", "processor hours",
                   "commit")
RULES = {"sgd": "SGD, Nesterov momentum", "lars": "LARS", "muon": "Muon"}


class Run(NamedTuple):
    """A seed. top1 and views_top1 are in percent, views_top1 is None without another evaluation.

    trained: path and title of the recipe, and the flags that it had then and has otherwise now, as Markdown, but for
    those that the command gives. reported: what the recipe says of the publication, if anything. flags: of the recipe
    as it was, and of the command.
    """

    trained: str
    reported: str | None
    command: str
    flags: dict[str, str]
    revision: str
    top1: float
    views_top1: float | None
    processor_hours: float
    curve: list[tuple[float, float]]  # epoch, top-1 in percent


def run(folder: Path) -> Run:
    about, summary = (json.loads((folder / name).read_text()) for name in ("run.json", "summary.json"))
    seconds = map(float, (folder / "processor_seconds.txt").read_text().split())
    evaluation = folder / "evaluation.json"
    views = 100 * json.loads(evaluation.read_text())["views_val_top1"] if evaluation.exists() else None
    path = "recipes/" + about["recipe"]["path"].partition("/recipes/")[2]
    now, given, defaults = read(FOLDER.parents[1] / path), flags_of(about["command"]), define()
    then = {name: default_text(defaults[name]) for name in now if name in defaults} | about["recipe"]["flags"]
    others = [f"--{name}={value}" for name, value in then.items() if name not in given and now.get(name) != value]
    trained = f"`{path}`: {now['title']}" + (f"; with `{' '.join(others)}`, as the recipe was then" if others else "")
    workers = summary["world_size"]
    command = " ".join([f"mpirun -np {workers} python" * (workers > 1), about["command"], *others]).strip()
    return Run(trained, about["recipe"]["reported"], command, then | given, about["git"]["revision"][:7],
               100 * summary["val_top1"], views, sum(seconds) / 3600,
               [(row["epoch"], 100 * row["val_top1"]) for row in RunFolder(folder).rows(METRICS)])


def flags_of(command: str) -> dict[str, str]:
    return flags_in("\n".join(shlex.split(command)))


def runs(folder: Path = PUBLISHED) -> dict[str, list[Run]]:
    """Returns the seeds of each row, by the folder's name."""
    return {row.name: [run(seed) for seed in sorted(row.iterdir())] for row in sorted(folder.iterdir()) if row.is_dir()}


def top1_cells(values: list[float]) -> list[str]:
    """Returns the mean and each value."""
    return [f"**{statistics.fmean(values):.2f} %**" if values else "", ", ".join(map("{:.2f}".format, values))]


def source_cells(seeds: list[Run]) -> list[str]:
    """Returns the processor hours of each seed, and the commits."""
    return [", ".join(f"{one.processor_hours:.2f}" for one in seeds),
            ", ".join(dict.fromkeys(one.revision for one in seeds))]


def cells(seeds: list[Run]) -> list[str]:
    return [seeds[0].trained, seeds[0].reported, *top1_cells([one.top1 for one in seeds]),
            *top1_cells([one.views_top1 for one in seeds if one.views_top1 is not None]), *source_cells(seeds)]


def cells_of_rule(seeds: list[Run]) -> list[str]:
    flags = seeds[0].flags
    return [RULES[flags["optimizer"]], flags["epochs"], flags["learning_rate"], flags["momentum"],
            *top1_cells([one.top1 for one in seeds]), *source_cells(seeds)]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *rows))


def with_commands(table: str, found: dict[str, list[Run]]) -> str:
    """Returns the table with the command of the first seed of each row below."""
    commands = "".join(f"uv run {seeds[0].command}\n" for seeds in found.values())
    return f"{table}\n```\n{commands}```\n"


def table(found: dict[str, list[Run]]) -> str:
    """Returns the runs beside what was published, as Markdown."""
    return with_commands(markdown(HEADER, map(cells, found.values())), found)


def rules(found: dict[str, list[Run]]) -> str:
    """Returns the runs at a large batch, as Markdown."""
    return with_commands(markdown(HEADER_OF_RULES, map(cells_of_rule, found.values())), found)


def trials(name: str) -> dict[str, dict[float, dict[float, float]]]:
    """Returns optimizer -> momentum -> learning rate -> top-1 in percent of each trial in large_batch/NAME.jsonl."""
    found = {rule: defaultdict(dict) for rule in RULES}
    for line in (LARGE_BATCH / f"{name}.jsonl").read_text().splitlines():
        trial = json.loads(line)
        flags = flags_of(trial["command"])
        rates = found[flags.get("optimizer", "sgd")][float(flags["momentum"])]
        rates[float(flags["learning_rate"])] = 100 * trial["val_top1"]
    return found


def search(name: str) -> str:
    """Returns the trials in large_batch/NAME.jsonl as Markdown, the best of each rule in bold."""
    lines = []
    for rule, momenta in trials(name).items():
        best = max((top1 for rates in momenta.values() for top1 in rates.values()), default=None)
        for momentum, rates in sorted(momenta.items()):
            tried = {f"{rate:g}: {top1:.2f}": top1 for rate, top1 in sorted(rates.items())}
            lines.append((RULES[rule], f"{momentum:g}",
                          ", ".join(f"**{text}**" if top1 == best else text for text, top1 in tried.items())))
    return markdown(("rule", "momentum", "learning rate: top-1"), lines)


def same_bits() -> str:
    """Returns the evaluations of an undisturbed and of a disturbed run side by side, as Markdown."""
    kept = (RunFolder(SAME_BITS / name).rows(METRICS) for name in ("undisturbed", "disturbed"))
    return markdown(("epoch", "validation top-1", "weights, undisturbed", "weights, disturbed"), (
        (f"{one['epoch']:g}", " and ".join(dict.fromkeys(f"{100 * row['val_top1']:.2f} %" for row in (one, other))),
         f"`{one['weights']}`", f"`{other['weights']}`") for one, other in zip(*kept, strict=True)))


def draw(found: dict[str, list[Run]], path: Path) -> None:
    """Draws the top-1 of each evaluation as points, with a dashed line where the published figure is."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "results", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(8, 3.5), squeeze=False)
    for (name, seeds), ax in zip(found.items(), axes[0], strict=True):
        published = float(re.search(r"top-1 ([\d.]+)", seeds[0].reported)[1])
        ax.axhline(published, linestyle="--", linewidth=1, color="#b0b0b0")
        for one in seeds:
            ax.plot(*zip(*one.curve, strict=True), linewidth=1, marker="o", markersize=3, color="#1f6fc0")
            if one.views_top1 is not None:
                ax.plot([one.curve[-1][0]], [one.views_top1], marker="D", markersize=4, color="#d97400")
        ax.set(xlabel="epoch", ylabel="validation top-1, %", title=name.replace("_", " "))
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)


if __name__ == "__main__":
    known = runs()
    parts = {"table": table(known), "rules": rules(runs(LARGE_BATCH)), "bits": same_bits(),
             **{name: search(name) for name in ("search", "longer")}}
    DOCUMENT.write_text(TABLE.sub(lambda match: match[1] + parts[match[2]], DOCUMENT.read_text()))
    draw(known, FIGURE)
