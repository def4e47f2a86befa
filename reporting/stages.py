"""The results of experiments.benchmark: the limiting stage and advice, as text, table and HTML page.

The table follows the GTC slides ("Throughput comparison"), and so do the two verdicts ("Host/IO limited",
"Device/Training limited").
"""
import html
from pathlib import Path

from common.files import write_atomically, write_json
from reporting import charts
from reporting.page import page, table

TITLES = {"read": "file reading", "decode": "+ decoding", "augment": "+ augmentation",
          "pipeline": "whole pipeline", "model": "model alone", "train": "training"}
VERDICTS = {"input": "host or I/O limited", "device": "device limited"}
CLOSE = 0.9  # training at this fraction of the model's own speed does not wait for its input
GAIN = 1.05  # a smaller gain is noise


def conclude(result: dict) -> dict:
    """Returns `limit` (`input` or `device`) and `advice` (a list of sentences).

    result: stages; threads (counts measured), cores, gpu (whether there is one), dali_device, format, image_size,
    shorter_side (typical, in pixels), precision.
    """
    rates = best(result["stages"])
    limit = "input" if rates["pipeline"] < rates["model"] and rates["train"] < CLOSE * rates["model"] else "device"
    advice = threads_advice(result) if limit == "input" else []
    return {"limit": limit, "advice": advice + (input_advice if limit == "input" else device_advice)(result, rates)}


def best(stages: list[dict]) -> dict[str, float]:
    """Returns the images per second of each stage, with the number of threads that trains fastest."""
    fastest = max((row for row in stages if row["name"] == "train"), key=lambda row: row["images_per_second"])
    return {row["name"]: row["images_per_second"] for row in stages if row["threads"] in (None, fastest["threads"])}


def costs(rates: dict[str, float]) -> dict[str, float]:
    """Returns the seconds per image that each step of the pipeline adds to those before it."""
    steps = ("read", "decode", "augment", "pipeline")
    return {step: max(0.0, 1 / rates[step] - (1 / rates[before] if before else 0))
            for before, step in zip((None, *steps), steps, strict=False)}


def threads_advice(result: dict) -> list[str]:
    by_count = {row["threads"]: row["images_per_second"] for row in result["stages"] if row["name"] == "pipeline"}
    most, fastest = max(by_count), max(by_count, key=by_count.get)
    fewer = [count for count in by_count if count < fastest]
    if fewer and by_count[fastest] > GAIN * by_count[max(fewer)]:
        more = f"; try more than {most}" if fastest == most and most < result["cores"] else ""
        return [f"More threads help: {by_count[fastest]:,.0f} images/s with --dali_threads={fastest}, "
                f"{by_count[max(fewer)]:,.0f} with {max(fewer)}{more}."]
    if len(by_count) == 1 and most < result["cores"]:
        return [f"This machine has {result['cores']} cores: try --dali_threads={most},{result['cores']}."]
    return []


def input_advice(result: dict, rates: dict[str, float]) -> list[str]:
    """Returns what to do about the step of the pipeline that takes the most time."""
    spent = costs(rates)
    largest = max(spent, key=spent.get)
    what = {"read": "Reading files", "decode": "Decoding", "augment": "Augmentation",
            "pipeline": "Passing batches to TensorFlow"}[largest]
    lines = [f"{what} takes {spent[largest] / sum(spent.values()):.0%} of the pipeline's time."]
    smaller = smaller_images(result)
    if largest == "read":
        lines.append("Copy the dataset to a local disk of the node with train.py --stage_dir=DIR.")
        if result["format"] == "folder":
            lines.append("Pack the files with data.prepare --source=... --format=tfrecord: they read faster.")
        lines += smaller
    elif largest == "decode":
        lines += smaller + gpu_advice(result, "decode")
    elif largest == "augment":
        lines += [*gpu_advice(result, "augment"), "Use a cheaper --augmentation, if accuracy allows."]
    else:
        lines.append("Try another --batch_size: batches that fit into the CPU cache are copied faster.")
    return lines


def device_advice(result: dict, rates: dict[str, float]) -> list[str]:
    speed, ratio = rates["train"] / rates["model"], rates["pipeline"] / rates["model"]
    lines = [f"Training runs at {speed:.0%} of the speed of the model alone. The pipeline alone delivers {ratio:.1f} "
             "times the images that the model alone processes."]
    if speed >= CLOSE:
        lines.append("The input is fast enough: use more workers or a faster device.")
    elif result["gpu"]:
        lines.append("Both together are slower than either alone: try a larger --batch_size or fewer --dali_threads.")
    else:
        lines += ["Model and pipeline share the CPU cores: a cheaper pipeline leaves more time for the model.",
                  *smaller_images(result)]
    if result["precision"] == "float32":
        lines.append(f"Try --precision=mixed_{'float16' if result['gpu'] else 'bfloat16'}.")
    return lines


def smaller_images(result: dict) -> list[str]:
    wanted = round(result["image_size"] * 256 / 224)
    if result["shorter_side"] < 1.25 * wanted:
        return []
    return [f"Store smaller images: their shorter side is {result['shorter_side']} pixels, but training "
            f"uses {result['image_size']}; data.prepare --resize_shorter={wanted} makes them cheaper to load."]


def gpu_advice(result: dict, verb: str) -> list[str]:
    if result["dali_device"] == "gpu":
        return ["The GPU decodes already: try other values of --hw_decoder_load."] if verb == "decode" else []
    if result["gpu"]:
        return [f"Let the GPU {verb} the images with --dali_device=gpu."]
    return [f"A GPU could {verb} the images (--dali_device=gpu), but this machine has none."]


def lines(result: dict) -> list[str]:
    """Returns the table, the verdict and the advice, for a terminal."""
    shown = [f"{'':22s}{'threads':>8s}{'images/s':>12s}{'MB/s':>10s}"]
    for row in result["stages"]:
        shown.append(f"{TITLES[row['name']]:22s}{row['threads'] or '':>8}{row['images_per_second']:12,.0f}"
                     f"{row['megabytes_per_second']:10,.1f}")
    return [*shown, "", f"{VERDICTS[result['limit']]}:", *(f"  {line}" for line in result["advice"])]


def write_stages(folder: Path, result: dict) -> Path:
    """Writes benchmark.json and benchmark.html, the table and a bar chart; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "benchmark.json", result)
    described = {key: value for key, value in result.items() if isinstance(value, int | float | str)}
    rows = [{"stage": TITLES[row["name"]], "threads": row["threads"] or "", "images/s": row["images_per_second"],
             "MB/s": row["megabytes_per_second"]} for row in result["stages"]]
    advice = "".join(f"<li>{html.escape(line)}</li>" for line in result["advice"])
    sections = [f"<p><b>{VERDICTS[result['limit']]}</b></p><ul>{advice}</ul>", bars(result["stages"]), table(rows),
                "<h2>Measured with</h2>", table([described])]
    path = folder / "benchmark.html"
    write_atomically(path, page("Where the time goes", sections))
    return path


def bars(stages: list[dict]) -> str:
    """Returns the images per second of each stage as an SVG. The axis is logarithmic: reading is far faster."""
    return charts.bars("images/s", [
        (TITLES[row["name"]] + (f", {row['threads']} threads" if row["threads"] else ""), row["images_per_second"],
         row["name"] in ("model", "train")) for row in stages])
