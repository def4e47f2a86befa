"""report.html: one self-contained page with a run's curves, plan and summary, made from the files in its folder."""
import html
import json
from pathlib import Path

from common.files import write_whole
from reporting import charts

CURVES = (  # title, unit of the vertical axis, {column of metrics.jsonl: label}
    ("Loss", "cross-entropy", {"train_loss": "train", "val_loss": "validation"}),
    ("Accuracy", "fraction", {"train_top1": "train top-1", "val_top1": "validation top-1",
                              "val_top5": "validation top-5"}),
    ("Learning rate", "rate", {"learning_rate": "learning rate"}),
    ("Throughput", "images/s", {"images_per_second": "training"}),
)
TIMES = {"compute": "computing", "data": "waiting for data", "exchange": "exchanging gradients"}
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0;display:block;overflow:auto}
td,th{padding:.2em .9em .2em 0;border-bottom:1px solid #ddd;text-align:left}
td{font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27em),1fr))}
pre{background:#f5f5f5;padding:1em;overflow:auto}"""


def write_report(folder) -> Path:
    """Writes FOLDER/report.html from plan.json, flags.txt, metrics.jsonl and summary.json; returns its path."""
    folder = Path(folder)
    plan, summary = (json.loads((folder / name).read_text()) for name in ("plan.json", "summary.json"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    flags = (folder / "flags.txt").read_text()
    sections = [
        f"<p>Validation top-1 <b>{summary['val_top1']:.2%}</b>, top-5 {summary['val_top5']:.2%} on "
        f"{summary['val_samples']:,} images after {summary['epochs']:g} epochs with batch "
        f"{summary['global_batch_size']:,} on {summary['world_size']} worker{'s' * (summary['world_size'] > 1)}; "
        f"{summary['images_per_second']:,.0f} images/s, {summary['seconds']:,.0f} s.</p>",
        curves(rows, plan), "<h2>Plan</h2>", table(plan["phases"]),
        table([{key: value for key, value in plan.items() if key not in ("phases", "schedule")}]),
        "<h2>Evaluations</h2>", table(rows), *times(folder / "times.jsonl"), *layers(folder / "trust_ratios.jsonl"),
        "<h2>Summary</h2>", table([summary]),
        "<h2>Flags</h2>", f"<pre>{html.escape(flags)}</pre>"]
    path = folder / "report.html"
    write_whole(path, page(folder.name, sections))
    return path


def page(title: str, sections: list[str]) -> str:
    """Returns a self-contained HTML page, which fetches nothing."""
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>" + "\n".join(sections) + "</html>\n")


def curves(rows: list[dict], plan: dict) -> str:
    """Returns the curves over epochs, as inline SVGs."""
    drawn = []
    for title, unit, columns in CURVES:
        points = plan["schedule"] + rows[-1:] if title == "Learning rate" else rows
        values = {label: [row[column] for row in points] for column, label in columns.items()}
        drawn.append(charts.curves(title, unit, [row["epoch"] for row in points], values, log=title == "Loss"))
    return f'<div class="charts">{"".join(drawn)}</div>'


def times(path: Path) -> list[str]:
    """Returns the step-time breakdown of each epoch, as bars that add up to 1 and as a table."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    rows = [row for row in rows if "compute" in row]  # an evaluation without a step before it has none
    if not rows:
        return []
    return ["<h2>Time</h2>", charts.stacked_bars(
        "Where the time went", "share of the time", [row["epoch"] for row in rows],
        {label: [row[name] for row in rows] for name, label in TIMES.items()}), table([{"epoch": row["epoch"]} | {
            label: row[name] for name, label in TIMES.items()} for row in rows])]


def layers(path: Path) -> list[str]:
    """Returns table 4 of arXiv:1708.03888 for the first step and the end of this run, and trust ratios over epochs."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ratios = {name: [row["layers"][name][2] for row in rows] for name in rows[0]["layers"]}
    listed = []
    for name, (weight, gradient, ratio) in rows[0]["layers"].items():
        last = rows[-1]["layers"][name]
        listed.append({"variable": name, "weight norm, first step": weight, "gradient norm": gradient,
                       "weight / gradient": weight / gradient if weight and gradient else None, "trust ratio": ratio,
                       "weight norm, at the end": last[0], "gradient norm ": last[1], "trust ratio ": last[2]})
    drawn = charts.curves("Trust ratio of each variable", "trust ratio", [row["epoch"] for row in rows], ratios,
                          log=True, size=(1000, 400))
    return ["<h2>Layer by layer</h2>", drawn, table(listed)]


def table(rows: list[dict]) -> str:
    def cell(value):
        if value is None:
            return "not a number"
        return f"{value:,.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value

    def line(values, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell(value)))}</{tag}>" for value in values) + "</tr>"

    return "<table>" + line([key.replace("_", " ") for key in rows[0]], "th") + "".join(
        line(row.values(), "td") for row in rows) + "</table>"
