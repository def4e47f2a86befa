"""Writes the tables of docs/results.md from the runs in docs/results/, and draws their curves.

    uv run --group benchmark python -m docs.results

docs/results/NAME/seedN is what is kept of a run that was trained to its end: run.json, summary.json and metrics.jsonl,
processor_seconds.txt with the user and system seconds of each start, and evaluation.json where it was evaluated with
more views. SAME_BITS has the first three files of two runs with the same settings, of which one was disturbed.
"""
import json
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from common.run_folder import METRICS, RunFolder
from docs.drawing import save
from plan.recipes import read

FOLDER = Path(__file__).parent / "results"
DOCUMENT, FIGURE = FOLDER.with_suffix(".md"), FOLDER.with_suffix(".svg")
SAME_BITS = FOLDER / "airbench_same_bits"
TABLE = re.compile(r"(<!-- (table|bits) -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEADER = ("recipe", "published", "ours, mean", "each seed", "with views, mean", "each seed with views",
          "processor hours", "commit")


class Run(NamedTuple):
    """A seed. top1 and views_top1 are in percent, views_top1 is None without another evaluation.

    trained: path and title of the recipe, and the flags that it had then and has otherwise now, as Markdown. reported:
    what it says of the publication.
    """

    trained: str
    reported: str
    command: str
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
    recipe = "recipes/" + about["recipe"]["path"].partition("/recipes/")[2]
    now = read(FOLDER.parents[1] / recipe)
    others = [f"--{name}={value}" for name, value in about["recipe"]["flags"].items() if now.get(name) != value]
    trained = f"`{recipe}`: {now['title']}" + (f"; with `{' '.join(others)}`, as the recipe was then" if others else "")
    workers = summary["world_size"]
    command = " ".join([f"mpirun -np {workers} python" * (workers > 1), about["command"], *others]).strip()
    return Run(trained, about["recipe"]["reported"], command, about["git"]["revision"][:7],
               100 * summary["val_top1"], views, sum(seconds) / 3600,
               [(row["epoch"], 100 * row["val_top1"]) for row in RunFolder(folder).rows(METRICS)])


def runs(folder: Path = FOLDER) -> dict[str, list[Run]]:
    """Returns the seeds of each row, by the folder's name."""
    return {row.name: [run(seed) for seed in sorted(row.iterdir())] for row in sorted(folder.iterdir())
            if row != SAME_BITS}


def cells(seeds: list[Run]) -> list[str]:
    found = []
    for values in ([one.top1 for one in seeds], [one.views_top1 for one in seeds if one.views_top1 is not None]):
        found += [f"**{statistics.fmean(values):.2f} %**" if values else "", ", ".join(map("{:.2f}".format, values))]
    hours = ", ".join(f"{one.processor_hours:.2f}" for one in seeds)
    commits = ", ".join(dict.fromkeys(one.revision for one in seeds))
    return [seeds[0].trained, seeds[0].reported, *found, hours, commits]


def table(found: dict[str, list[Run]]) -> str:
    """Returns the runs as Markdown, with the command of the first seed of each row below."""
    lines = [HEADER, ["---"] * len(HEADER), *map(cells, found.values())]
    commands = "\n".join(f"uv run {seeds[0].command}" for seeds in found.values())
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n```\n{commands}\n```\n"


def same_bits() -> str:
    """Returns the evaluations of an undisturbed and of a disturbed run side by side, as Markdown."""
    lines = [("epoch", "validation top-1", "weights, undisturbed", "weights, disturbed"), ["---"] * 4]
    kept = (RunFolder(SAME_BITS / name).rows(METRICS) for name in ("undisturbed", "disturbed"))
    for one, other in zip(*kept, strict=True):
        top1 = " and ".join(dict.fromkeys(f"{100 * row['val_top1']:.2f} %" for row in (one, other)))
        lines.append((f"{one['epoch']:g}", top1, f"`{one['weights']}`", f"`{other['weights']}`"))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
    parts = {"table": table(known), "bits": same_bits()}
    DOCUMENT.write_text(TABLE.sub(lambda match: match[1] + parts[match[2]], DOCUMENT.read_text()))
    draw(known, FIGURE)
