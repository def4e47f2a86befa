"""The results of experiments.benchmark as text, JSON and HTML pages.

benchmark.json and benchmark.html: the stages of one worker, and which limits it, as in the GTC slides ("Throughput
comparison"). speed.json and speed.html: training by number of workers and batch size, with speed-up for the same global
batch (arXiv:1708.03888, tables 8 to 11) and efficiency for the same images per worker (arXiv:1811.05233, table 6).
"""
import contextlib
import html
import json
from collections.abc import Callable
from pathlib import Path

from common.files import write_atomically, write_json
from reporting import charts
from reporting.charts import Line
from reporting.page import page, table, without_empty_columns

STAGES = {"read": "file reading", "decode": "+ decoding", "augment": "+ augmentation",
          "pipeline": "whole pipeline", "model": "model alone", "train": "training"}
ADDED = {"read": "file reading", "decode": "decoding", "augment": "augmentation",
         "pipeline": "passing batches to TensorFlow"}  # the work that a stage of the pipeline adds
CLOSE = 0.9  # training at this fraction of the model's own speed does not wait for its input
PARTS = ("compute", "data", "exchange")
# Rows are compared only if all of these agree.
WHAT = ("data_dir", "device", "model", "image_size", "precision", "augmentation", "compression", "allreduce")
WHICH = (*WHAT, "workers", "workers_per_node", "global_batch_size", "micro_batch_size", "grid")
NOTE = ("Speed-up: images/s relative to the fewest workers with the same global batch. Efficiency: images/s per worker "
        "relative to the fewest workers with the same images per worker. Compute, data and exchange: computing, "
        "waiting for images, and the part of the exchange that nothing overlaps.")


def limit(stages: list[dict]) -> dict[str, str]:
    """Returns `limit` (`input` or `device`) and `because`, a sentence, for the number of threads that trains fastest.

    stages: each with name (see STAGES), images_per_second, threads (None for `model`).
    """
    fastest = max((row for row in stages if row["name"] == "train"), key=lambda row: row["images_per_second"])
    rates = {row["name"]: row["images_per_second"] for row in stages if row["threads"] in (None, fastest["threads"])}
    part = rates["train"] / rates["model"]
    if part >= CLOSE or rates["pipeline"] >= rates["model"]:
        because = (f"training runs at {part:.0%} of the speed of the model alone, and the pipeline alone delivers "
                   f"{rates['pipeline'] / rates['model']:.1f} times the images that the model processes")
        return {"limit": "device", "because": f"device limited: {because}"}
    spent, before = {}, 0.0
    for name in ADDED:
        spent[name] = max(0.0, 1 / rates[name] - before)
        before = 1 / rates[name]
    slowest = max(spent, key=spent.get)
    share = spent[slowest] / sum(spent.values())
    return {"limit": "input",
            "because": f"host or I/O limited: {ADDED[slowest]} takes {share:.0%} of the pipeline's time"}


def stage_lines(result: dict) -> list[str]:
    """Returns the table of the stages and the line that names the limit, for a terminal."""
    shown = [f"{'':22s}{'threads':>8s}{'images/s':>12s}{'MB/s':>10s}"]
    for row in result["stages"]:
        shown.append(f"{STAGES[row['name']]:22s}{row['threads'] or '':>8}{row['images_per_second']:12,.0f}"
                     f"{row['megabytes_per_second']:10,.1f}")
    return [*shown, "", result["because"]]


def write_stages(folder: Path, result: dict) -> Path:
    """Writes benchmark.json and benchmark.html; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "benchmark.json", result)
    rows = [{"stage": STAGES[row["name"]], "threads": row["threads"] or "", "images/s": row["images_per_second"],
             "MB/s": row["megabytes_per_second"]} for row in result["stages"]]
    bars = [(row["stage"] + (f", {row['threads']} threads" if row["threads"] else ""), row["images/s"],
             row["stage"] in (STAGES["model"], STAGES["train"])) for row in rows]
    about = {name: value for name, value in result.items() if name not in ("stages", "limit", "because")}
    path = folder / "benchmark.html"
    write_atomically(path, page("Where the time goes", [
        f"<p><b>{html.escape(result['because'])}</b></p>", charts.bars("images/s", bars), table(rows),
        "<h2>Measured with</h2>", table([about])]))
    return path


def merged(folder: Path | None, rows: list[dict]) -> list[dict]:
    """Returns the rows of speed.json in a folder, if any, and these, which replace older measurements of the same."""
    earlier = []
    if folder:
        with contextlib.suppress(FileNotFoundError, ValueError):
            earlier = json.loads((folder / "speed.json").read_text())
    every = {tuple(str(row[name]) for name in WHICH): row for row in [*earlier, *rows]}
    return compared(sorted(every.values(), key=lambda row: (
        [str(row[name]) for name in WHAT[:-1]], row["global_batch_size"], row["workers"], row["micro_batch_size"])))


def compared(rows: list[dict]) -> list[dict]:
    """Returns the rows with `speedup` and `efficiency`, None for a row of the fewest workers."""
    return [row | {"speedup": relative(rows, row, same_batch, lambda one: one["images_per_second"]),
                   "efficiency": relative(rows, row, same_share, per_worker)} for row in rows]


def same_batch(row: dict):
    return row["global_batch_size"]


def same_share(row: dict):
    return row["micro_batch_size"], row["accumulation_steps"]


def per_worker(row: dict) -> float:
    return row["images_per_second"] / row["workers"]


def same_what(row: dict, other: dict) -> bool:
    """Whether two rows measure the same training. One worker has no all-reduce, so it is compared with any."""
    names = WHAT if 1 not in (row["workers"], other["workers"]) else WHAT[:-1]
    return all(row[name] == other[name] for name in names)


def relative(rows: list[dict], row: dict, same: Callable, speed: Callable) -> float | None:
    """Returns a row's speed relative to the fewest workers of the same training, None if these are its own.

    same: returns what else has to agree.
    """
    base = min((one for one in rows if same_what(one, row) and same(one) == same(row)), key=lambda one: one["workers"])
    return None if base["workers"] == row["workers"] else speed(row) / speed(base)


def cells(row: dict) -> dict[str, str]:
    """Returns a line of the table: column -> text."""
    grid = "x".join(map(str, row["grid"]))
    steps = f" x {row['accumulation_steps']}" if row["accumulation_steps"] > 1 else ""
    forecast = row.get("forecast_images_per_second")
    return {"workers": f"{row['workers']:,}", "all-reduce": row["allreduce"] + f" {grid}" * (row["grid"][1] > 1),
            "batch": f"{row['global_batch_size']:,}", "per worker": f"{row['micro_batch_size']:,}{steps}",
            "step, ms": f"{1e3 * row['step_seconds']:,.1f}", "images/s": f"{row['images_per_second']:,.0f}",
            "speed-up": "-" if row["speedup"] is None else f"{row['speedup']:.2f}",
            "efficiency": "-" if row["efficiency"] is None else f"{row['efficiency']:.1%}",
            **{part: f"{row[part]:.0%}" for part in PARTS},
            "forecast": f"{forecast:,.0f} ({forecast / row['images_per_second'] - 1:+.0%})" if forecast else ""}


def lines(rows: list[dict]) -> list[str]:
    """Returns the table for a terminal, with a heading for each kind of training."""
    shown, texts = [], [cells(row) for row in rows]
    columns = [name for name in texts[0] if any(text[name] for text in texts)]
    widths = {name: max(len(name), *(len(text[name]) for text in texts)) for name in columns}
    for heading, own in by_heading(rows).items():
        table_lines = [{name: name for name in columns}, *map(cells, own)]
        shown += ["", heading, *("  ".join(line[name].rjust(widths[name]) for name in columns) for line in table_lines)]
    return shown[1:]


def by_heading(rows: list[dict]) -> dict[str, list[dict]]:
    """Groups the rows by what they measure, in words."""
    grouped = {}
    for row in rows:
        grouped.setdefault(headed(row), []).append(row)
    return grouped


def headed(row: dict) -> str:
    return (f"{row['model']} on {row['data_dir']}, {row['image_size']} pixels, {row['device'].upper()}, "
            f"{row['precision']}, --augmentation={row['augmentation']}, --compression={row['compression']}")


def write_speed(folder: Path, rows: list[dict]) -> Path:
    """Writes speed.json and speed.html; returns the page's path. rows: of `merged`."""
    write_json(folder / "speed.json", rows)
    sections = [f"<p>{NOTE}</p>"]
    for heading, own in by_heading(rows).items():
        sections += [f"<h2>{html.escape(heading)}</h2>", f'<div class="charts">{plot(own)}{parts(own)}</div>',
                     table(without_empty_columns([cells(row) for row in own]))]
    path = folder / "speed.html"
    write_atomically(path, page("Speed by workers and batch size", sections))
    return path


def plot(rows: list[dict]) -> str:
    """Returns images/s against workers: a line per batch size and all-reduce, and a dashed one for its forecast.

    The lines of all all-reduces start at one worker, which has none. The ideal line multiplies the fastest row of the
    fewest workers.
    """
    most, fewest = (choose(row["workers"] for row in rows) for choose in (max, min))
    series = []
    allreduces = {row["allreduce"] for row in rows if row["workers"] > 1} or {"none"}
    curves = {(batch, allreduce): [row for row in rows if row["global_batch_size"] == batch
                                   and (row["workers"] == 1 or row["allreduce"] == allreduce)]
              for batch in sorted({row["global_batch_size"] for row in rows}) for allreduce in sorted(allreduces)}
    for colour, ((batch, allreduce), own) in enumerate(curves.items()):
        workers, label = [row["workers"] for row in own], f"batch {batch:,}, {allreduce}"
        series.append(Line(label, workers, [row["images_per_second"] for row in own], colour))
        if any("forecast_images_per_second" in row for row in own):
            forecasts = [row.get("forecast_images_per_second") for row in own]
            series.append(Line(f"{label}, forecast", workers, forecasts, colour, "dashed"))
    if most > fewest:
        fastest = max(row["images_per_second"] for row in rows if row["workers"] == fewest)
        series.append(Line("ideal", [0, most], [0.0, fastest / fewest * most], 7, "faint"))
    return charts.lines("images/s", "workers", series, x_end=most, from_zero=True)


def parts(rows: list[dict]) -> str:
    """Returns where the time of a step goes, a bar per row."""
    names = [f"{row['workers']:,} x {row['global_batch_size']:,}" for row in rows]
    return charts.stacked_bars("Where the time of a step goes", "workers x global batch size", names,
                               {part: [row[part] for row in rows] for part in PARTS})
