"""Draws docs/study.svg and prints its numbers: `uv run --group benchmark python -m docs.study STUDY [STUDY ...] NOISE`.

STUDY: folder of the sweep of recipes/study/search.runs or optimizers.runs with --search_data_dir. NOISE: folder of a
run with --log_noise_scale. The plot has each seed, their mean, and the range of the gradient noise scale over the
epochs: the batch sizes up to which larger batches should save updates.
"""
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

FIGURE = Path(__file__).parent / "study.svg"
RULES = {"sgd": "SGD, linear scaling and warm-up", "lars": "LARS and warm-up", "lamb": "LAMB and warm-up",
         "muon": "Muon and warm-up"}


def results(rows: list[dict]) -> dict[str, dict[int, tuple[float, list[float]]]]:
    """Returns rule -> batch size -> (best learning rate, top-1 of each seed) from the rows of sweep.json.

    Rows with a data_dir belong to the search, and those with a model are of another network.
    """
    found = {name: defaultdict(list) for name in RULES}
    for flags, row in ((row["flags"], row) for row in rows if not {"data_dir", "model"} & row["flags"].keys()):
        rule = flags.get("optimizer") or Path(flags["flagfile"]).name
        found[rule][flags["batch_size"]].append((flags["learning_rate"], row["val_top1"]))
    return {RULES[rule]: {batch: (seeds[0][0], [top1 for _, top1 in seeds]) for batch, seeds in sorted(own.items())}
            for rule, own in found.items() if own}


def noise_range(rows: list[dict]) -> tuple[float, float] | None:
    """Returns the lowest and the highest gradient noise scale that is known, in samples."""
    known = [row["noise_scale"] for row in rows if row["noise_scale"] is not None]
    return (min(known), max(known)) if known else None


def table(found: dict, noise: tuple[float, float] | None) -> str:
    """Returns the results as Markdown."""
    batches = sorted({batch for own in found.values() for batch in own})
    lines = [["batch size", *(f"{batch:,}" for batch in batches)], ["---"] * (1 + len(batches))]
    for rule, own in found.items():
        lines += [[rule, *(spread(own[batch][1]) if batch in own else "" for batch in batches)],
                  ["its best learning rate", *(f"{own[batch][0]:g}" if batch in own else "" for batch in batches)]]
    known = f"{noise[0]:,.0f} to {noise[1]:,.0f} samples" if noise else "unknown"
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\nGradient noise scale: {known}"


def spread(top1: list[float]) -> str:
    """Returns mean, lowest and highest value in percent."""
    mean, low, high = (100 * one for one in (statistics.fmean(top1), min(top1), max(top1)))
    return f"{mean:.1f} % ({low:.1f} to {high:.1f})"


def draw(found: dict, noise: tuple[float, float] | None, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "study", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for rule, own in found.items():
        means = [100 * statistics.fmean(top1) for _, top1 in own.values()]
        line, = axes.plot([*own], means, "o-", markersize=9, label=rule)
        axes.plot([batch for batch, (_, top1) in own.items() for _ in top1],
                  [100 * one for _, top1 in own.values() for one in top1], ".", color=line.get_color(), alpha=0.6)
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
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(*folders: str) -> None:
    *studies, noise = folders
    found = results([row for study in studies for row in json.loads(Path(study, "sweep.json").read_text())])
    scale = noise_range([json.loads(line) for line in Path(noise, "noise_scale.jsonl").read_text().splitlines()])
    draw(found, scale, FIGURE)
    print(table(found, scale))


if __name__ == "__main__":
    main(*sys.argv[1:])
