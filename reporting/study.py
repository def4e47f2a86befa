"""study.html: a table and a plot of accuracy against batch size, from the rows of experiments.study."""
import io
from pathlib import Path

from common.files import write_atomically, write_json
from reporting.page import page, table


def write_study(folder: Path, rows: list[dict], small_batch: int) -> Path:
    """Writes study.json and study.html; returns the page's path.

    rows: rule, batch, rate (for the small batch if the rule scales it), accuracies (one per seed).
    """
    from matplotlib.figure import Figure

    write_json(folder / "study.json", rows)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for rule in dict.fromkeys(row["rule"] for row in rows):
        points = [row for row in rows if row["rule"] == rule]
        means = [_mean(row) for row in points]
        axes.plot([row["batch"] for row in points], means, marker="o", label=rule)
        for row in points:
            axes.plot([row["batch"]] * len(row["accuracies"]), row["accuracies"], ".", color="grey", ms=4)
    axes.set(xscale="log", xlabel="global batch size", ylabel="validation top-1",
             title="Accuracy after the same number of epochs")
    axes.set_xticks(batches := sorted({row["batch"] for row in rows}), [str(batch) for batch in batches], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    listed = [{"batch": row["batch"], "times the small batch": row["batch"] // small_batch, "rule": row["rule"],
               "rate": row["rate"], "mean top-1": f"{_mean(row):.2%}", "seeds": len(row["accuracies"]),
               "lowest": f"{min(row['accuracies']):.2%}", "highest": f"{max(row['accuracies']):.2%}"} for row in rows]
    path = folder / "study.html"
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    write_atomically(path, page("Large batches", [drawn.getvalue()[drawn.getvalue().index("<svg"):], table(listed)]))
    return path


def _mean(row):
    return sum(row["accuracies"]) / len(row["accuracies"])
