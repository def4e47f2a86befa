"""The results of experiments.benchmark as text, JSON and HTML pages.

benchmark.json and benchmark.html: the stages of one worker, and which limits it, as in the GTC slides ("Throughput
comparison"). speed.json and speed.html: training by number of workers and batch size, with speed-up for the same global
batch (arXiv:1708.03888, tables 8 to 11) and efficiency for the same images per worker (arXiv:1811.05233, table 6).
"""
import contextlib
import html
import json
import operator
from pathlib import Path

from common import command
from common.activity import PARTS
from common.files import write_atomically, write_json
from reporting import charts
from reporting.charts import Line, XAxis
from reporting.page import filled_columns, grouped, html_table, page

STAGES = {"read": "file reading", "decode": "+ decoding", "augment": "+ augmentation",
          "pipeline": "whole pipeline", "model": "model alone", "train": "training"}
ADDED = {"read": "file reading", "decode": "decoding", "augment": "augmentation",
         "pipeline": "passing batches to TensorFlow"}  # the work that a stage of the pipeline adds
SMALLER = "smaller stored images (`data.prepare --resize_shorter=256` for 224 pixels)"
LIGHTER = "the GPU (`--dali_device=gpu`; if it decodes already, another --hw_decoder_load), or a cheaper --augmentation"
CURES = {"read": f"a copy on a local disk (`--stage_dir=DIR`), TFRecord in place of a folder, or {SMALLER}",
         "decode": f"{SMALLER}, {LIGHTER}", "augment": LIGHTER, "pipeline": "another --micro_batch_size"}
MORE_THREADS = "more threads, if there are more cores: `--dali_threads=2,4,8` measures several numbers"
FASTER = {"cpu": "more workers, --xla, and --precision=mixed_bfloat16 where the CPU has avx512_bf16 or AMX",
          "gpu": "more workers, a faster GPU, --xla, and --precision=mixed_float16"}
WAITING = {"cpu": f"{SMALLER}, or a cheaper --augmentation, since model and pipeline share the cores",
           "gpu": "a larger --micro_batch_size, or fewer --dali_threads"}
CLOSE = 0.9  # fraction of the model's own speed, from which training does not wait for its input
SAME_WORK = ("data_dir", "device", "model", "image_size", "precision", "augmentation", "compression", "allreduce")
SAME_MEASUREMENT = (*SAME_WORK, "workers", "workers_per_node", "global_batch_size", "micro_batch_size", "grid")
NOTE = ("Speed-up: images/s relative to the fewest workers with the same global batch. Efficiency: images/s per worker "
        "relative to the fewest workers with the same images per worker. Compute, data and exchange: computing, "
        "waiting for images, and the part of the exchange that nothing overlaps.")


def limit(stages: list[dict], device: str) -> dict[str, str]:
    """Returns `limit` (`input` or `device`) and `because`, a sentence, for the number of threads that trains fastest.

    stages: each with name (see STAGES), images_per_second, threads (None for `model`). device: cpu or gpu.
    """
    fastest = max((row for row in stages if row["name"] == "train"), key=lambda row: row["images_per_second"])
    rates = {row["name"]: row["images_per_second"] for row in stages if row["threads"] in (None, fastest["threads"])}
    part = rates["train"] / rates["model"]
    if part >= CLOSE or rates["pipeline"] >= rates["model"]:
        because = (f"training runs at {part:.0%} of the speed of the model alone, and the pipeline alone delivers "
                   f"{rates['pipeline'] / rates['model']:.1f} times the images that the model processes")
        cure = FASTER[device] if part >= CLOSE else WAITING[device]
        return {"limit": "device", "because": f"device limited: {because}. What helps: {cure}"}
    spent = {}
    before = 0.0
    for name in ADDED:
        spent[name] = max(0.0, 1 / rates[name] - before)
        before = 1 / rates[name]
    slowest = max(spent, key=spent.get)
    share = spent[slowest] / sum(spent.values())
    return {"limit": "input",
            "because": f"host or I/O limited: {ADDED[slowest]} takes {share:.0%} of the pipeline's time. What helps: "
                       f"{CURES[slowest]}; {MORE_THREADS}"}


def stage_cells(result: dict) -> list[dict[str, str]]:
    """Returns the lines of the table of the stages: column -> text."""
    return [{"stage": STAGES[row["name"]], "threads": str(row["threads"] or ""),
             "images/s": f"{row['images_per_second']:,.0f}", "MB/s": f"{row['megabytes_per_second']:,.1f}"}
            for row in result["stages"]]


def stage_lines(result: dict) -> list[str]:
    """Returns the table of the stages and the line that names the limit, for a terminal."""
    width = max(map(len, STAGES.values()))  # names begin at the left, numbers end at the right
    cells = [row | {"stage": row["stage"].ljust(width)} for row in stage_cells(result)]
    return [*command.table(cells, str.rjust), "", result["because"]]


def write_stages(folder: Path, result: dict) -> Path:
    """Writes benchmark.json and benchmark.html; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "benchmark.json", result)
    bars = [(STAGES[row["name"]] + f", {row['threads']} threads" * bool(row["threads"]), row["images_per_second"],
             row["name"] in ("model", "train")) for row in result["stages"]]
    about = {name: value for name, value in result.items() if name not in ("stages", "limit", "because")}
    path = folder / "benchmark.html"
    write_atomically(path, page("Where the time goes", [
        f"<p><b>{html.escape(result['because'])}</b></p>", charts.bars("images/s", bars),
        html_table(stage_cells(result)), "<h2>Measured with</h2>", html_table([about])]))
    return path


def merged(folder: Path | None, rows: list[dict]) -> list[dict]:
    """Returns these rows and those of speed.json, without older measurements of the same work."""
    earlier = []
    if folder:
        with contextlib.suppress(FileNotFoundError, ValueError):
            earlier = json.loads((folder / "speed.json").read_text())
    every = {tuple(str(row[name]) for name in SAME_MEASUREMENT): row for row in [*earlier, *rows]}
    return compared(sorted(every.values(), key=lambda row: (
        *(str(row[name]) for name in SAME_WORK[:-1]), row["global_batch_size"], row["workers"],
        row["micro_batch_size"])))


def compared(rows: list[dict]) -> list[dict]:
    """Adds `speedup` and `efficiency` to the rows: None in a row of the fewest workers."""
    return [row | {"speedup": relative(rows, row, ["global_batch_size"])[0],
                   "efficiency": relative(rows, row, ["micro_batch_size", "accumulation_steps"])[1]} for row in rows]


def relative(rows: list[dict], row: dict, alike: list[str]) -> tuple[float, float] | tuple[None, None]:
    """Returns a row's images/s, and its images/s per worker, relative to the row of the fewest workers.

    Both are None if that is the row itself. Rows are compared if they agree in SAME_WORK and `alike`. One worker has no
    all-reduce, so its row is compared with those of any.
    """
    def is_same(other) -> bool:
        names = SAME_WORK if 1 not in (row["workers"], other["workers"]) else SAME_WORK[:-1]
        return all(row[name] == other[name] for name in (*names, *alike))

    base = min(filter(is_same, rows), key=operator.itemgetter("workers"))
    if base["workers"] == row["workers"]:
        return None, None
    ratio = row["images_per_second"] / base["images_per_second"]
    return ratio, ratio * base["workers"] / row["workers"]


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
    """Returns the table for a terminal, with a heading for each model, dataset and precision."""
    columns, *texts = command.table(filled_columns([cells(row) for row in rows]), str.rjust)
    shown = []
    for heading, own in grouped(zip(rows, texts, strict=True), lambda pair: headed(pair[0])).items():
        shown += ["", heading, columns, *(text for _, text in own)]
    return shown[1:]


def headed(row: dict) -> str:
    return (f"{row['model']} on {row['data_dir']}, {row['image_size']} pixels, {row['device'].upper()}, "
            f"{row['precision']}, --augmentation={row['augmentation']}, --compression={row['compression']}")


def write_speed(folder: Path, rows: list[dict]) -> Path:
    """Writes speed.json and speed.html; returns the page's path. rows: of `merged`."""
    write_json(folder / "speed.json", rows)
    sections = [f"<p>{NOTE}</p>"]
    for heading, own in grouped(rows, headed).items():
        sections += [f"<h2>{html.escape(heading)}</h2>", f'<div class="charts">{plot(own)}{parts(own)}</div>',
                     html_table(filled_columns([cells(row) for row in own]))]
    path = folder / "speed.html"
    write_atomically(path, page("Speed by workers and batch size", sections))
    return path


def plot(rows: list[dict]) -> str:
    """Returns images/s against workers: a line per batch size and all-reduce, and a dashed one for its forecast.

    The lines of all all-reduces start at one worker, which has none. The ideal line multiplies the fastest row of the
    fewest workers.
    """
    most = max(row["workers"] for row in rows)
    fewest = min(row["workers"] for row in rows)
    series = []
    x = XAxis("workers", operator.itemgetter("workers"), most)
    allreduces = {row["allreduce"] for row in rows if row["workers"] > 1} or {"none"}
    curves = {(batch, allreduce): [row for row in rows if row["global_batch_size"] == batch
                                   and (row["workers"] == 1 or row["allreduce"] == allreduce)]
              for batch in sorted({row["global_batch_size"] for row in rows}) for allreduce in sorted(allreduces)}
    for colour, ((batch, allreduce), own) in enumerate(curves.items()):
        label = f"batch {batch:,}, {allreduce}"
        series.append(charts.line(label, own, x, "images_per_second", colour=colour))
        if any("forecast_images_per_second" in row for row in own):
            series.append(charts.line(f"{label}, forecast", own, x, "forecast_images_per_second", colour=colour,
                                      kind="dashed"))
    if most > fewest:
        fastest = max(row["images_per_second"] for row in rows if row["workers"] == fewest)
        series.append(Line("ideal", [0, most], [0.0, fastest / fewest * most], 7, "faint"))
    return charts.lines("images/s", x, series, charts.FROM_ZERO)


def parts(rows: list[dict]) -> str:
    """Returns where the time of a step goes, a bar per row."""
    names = [f"{row['workers']:,} x {row['global_batch_size']:,}" for row in rows]
    return charts.stacked_bars("Where the time of a step goes", "workers x global batch size", names,
                               {part: [row[part] for row in rows] for part in PARTS})
