"""Prints the results of the study of batch sizes as a table, and draws docs/study.svg from the document's table.

    uv run python -m docs.study STUDY [STUDY ...] [NOISE]      prints
    uv run --group benchmark python -m docs.study              draws

STUDY: folder of the sweep of recipes/study/search.runs or optimizers.runs with --search_data_dir. NOISE: folder of a
run with --log_noise_scale. The plot has means and ranges of the seeds, and the range of the gradient noise scale over
the epochs: the batch sizes up to which larger batches should save updates.
"""
import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from docs.drawing import save

FIGURE = Path(__file__).parent / "study.svg"
DOCUMENT = Path(__file__).parent / "large_batches.md"
RATE = "its best learning rate"
RULES = {"sgd": "SGD, linear scaling and warm-up", "lars": "LARS and warm-up", "lamb": "LAMB and warm-up",
         "muon": "Muon and warm-up"}


class Result(NamedTuple):
    """The seeds of a batch size: mean, lowest and highest top-1 in percent. rate: the best learning rate."""

    rate: float
    mean: float
    low: float
    high: float

    def __str__(self):
        return f"{self.mean:.1f} % ({self.low:.1f} to {self.high:.1f})"


def tasks(rows: list[dict]) -> list[list[dict]]:
    """Returns the rows of sweep.json that do not belong to the search, by dataset and network."""
    found = defaultdict(list)
    for row in rows:
        if row["final"]:
            found[row["flags"].get("data_dir"), row["flags"].get("model")].append(row)
    return [*found.values()]


def results(rows: list[dict]) -> dict[str, dict[int, Result]]:
    """Returns rule -> batch size -> result from the rows of a task."""
    found = {name: defaultdict(list) for name in RULES}
    for row in rows:
        flags = row["flags"]
        rule = flags.get("optimizer") or Path(flags["flagfile"]).name
        found[rule][flags["batch_size"]].append((flags["learning_rate"], 100 * row["val_top1"]))
    return {RULES[rule]: {batch: Result(seeds[0][0], statistics.fmean(top1 := [one for _, one in seeds]), min(top1),
                                        max(top1)) for batch, seeds in sorted(own.items())}
            for rule, own in found.items() if own}


def read(text: str) -> tuple[dict[str, dict[int, Result]], tuple[float, float] | None]:
    """Returns results and noise scale from the first table of `text` that `table` has printed."""
    lines = text[text.index("| batch size |"):].splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    batches, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end])
    found = {}
    for (rule, *cells), (_, *rates) in zip(rows[::2], rows[1::2], strict=True):
        found[rule] = {int(batch.replace(",", "")): Result(float(rate), *map(float, re.findall(r"[\d.]+", cell)))
                       for batch, cell, rate in zip(batches[1:], cells, rates, strict=True) if cell}
    noise = re.search(r"Gradient noise scale: ([\d,]+) to ([\d,]+)", text)
    return found, noise and tuple(float(one.replace(",", "")) for one in noise.groups())


def noise_range(rows: list[dict]) -> tuple[float, float] | None:
    """Returns the lowest and the highest gradient noise scale that is known, in samples."""
    known = [row["noise_scale"] for row in rows if row["noise_scale"] is not None]
    return (min(known), max(known)) if known else None


def table(found: dict, noise: tuple[float, float] | None) -> str:
    """Returns the results as Markdown."""
    batches = sorted({batch for own in found.values() for batch in own})
    lines = [["batch size", *(f"{batch:,}" for batch in batches)], ["---"] * (1 + len(batches))]
    for rule, own in found.items():
        lines += [[rule, *(str(own.get(batch, "")) for batch in batches)],
                  [RATE, *(f"{own[batch].rate:g}" if batch in own else "" for batch in batches)]]
    known = f"{noise[0]:,.0f} to {noise[1]:,.0f} samples" if noise else "unknown"
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\nGradient noise scale: {known}"


def draw(found: dict, noise: tuple[float, float] | None, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "study", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for rule, own in found.items():
        means = [one.mean for one in own.values()]
        ranges = [[one.mean - one.low for one in own.values()], [one.high - one.mean for one in own.values()]]
        axes.errorbar([*own], means, ranges, fmt="o-", capsize=4, label=rule)
    if noise:
        axes.axvspan(*noise, color="grey", alpha=0.15,
                     label=f"gradient noise scale, {noise[0]:,.0f} to {noise[1]:,.0f}")
    axes.set_xscale("log", base=2)
    batches = sorted({batch for own in found.values() for batch in own})
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.set(xlabel="batch size", ylabel="validation top-1, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)


def main(*folders: str) -> None:
    if not folders:
        draw(*read(DOCUMENT.read_text()), FIGURE)
        return
    studies = [folder for folder in map(Path, folders) if (folder / "sweep.json").exists()]
    rows = [row for study in studies for row in json.loads((study / "sweep.json").read_text())]
    noise = [json.loads(line) for folder in map(Path, folders) if folder not in studies
             for line in (folder / "noise_scale.jsonl").read_text().splitlines()]
    for own in tasks(rows):
        print(table(results(own), noise_range(noise)))


if __name__ == "__main__":
    main(*sys.argv[1:])
