"""Sentences on a run: what was trained, the paper's figure, its state, waiting for storage; accuracies in words."""
import html
import math
import time
from itertools import pairwise

from common import metric
from common.accuracy import against_guessing, interval
from common.errors import plural
from common.screen import clock_time
from reporting.charts import number
from reporting.heat_map import class_totals
from reporting.page import duration, prose
from reporting.run_data import RunData

BINARY = "binary_cross_entropy"
STORAGE_LIMITS = 0.05  # share of step time spent waiting for storage, from which a sentence says so


def result(run: RunData) -> str:
    """Returns what has been trained and evaluated, and whether it is no better than guessing, with HTML."""
    now = run.result
    model = html.escape(run.flags["model"])
    if run.divergence and not run.rows:
        return f"{model} <b>diverged</b> before its first evaluation."
    if not run.rows and not run.summary:
        return f"{model} has not been evaluated yet."
    batch, epochs = now.get("global_batch_size") or now["batch_size"], now.get("epochs") or now["epoch"]
    data = html.escape(run.flags["data_dir"].rstrip("/").rpartition("/")[2])
    images = f"{plural(samples := validation_samples(run), 'validation image')} of {data}"
    five = ", top-5 the share of those whose class is among the five most probable" * run.has_top5
    most, of = most_frequent(run)[1:]
    verdict = against_guessing(run.shown[metric.VAL_TOP1], samples, most / of) if of else ""
    guesses = f" This is <b>{verdict}</b>." if verdict else ""
    return (f"{model} {'was' if run.summary else 'has been'} trained for {number(epochs)} epoch{'s' * (epochs != 1)} "
            f"with batch size {number(batch)} on {plural(run.workers, 'worker')}, in {duration(now['seconds'])}. Top-1 "
            f"is the share of the {images} whose most probable class is the right one{five}.{guesses}")


def mixes(run: RunData) -> bool:
    """Whether training images are mixed, so that training's top-1 is that of one of two labels."""
    return any(float(run.flags.get(name, 0)) for name in ("mixup", "cutmix"))


def losses(run: RunData) -> list[str]:
    """Returns a sentence on what the training loss has that the validation loss has not, if there is anything."""
    is_binary, smoothing = run.flags.get("loss") == BINARY, float(run.flags.get("label_smoothing", 0))
    parts = ["binary cross-entropy" if is_binary else "cross-entropy"]
    parts += [f"with label smoothing of {smoothing:g}"] * (smoothing > 0) + ["over mixed images"] * mixes(run)
    return [f"The training loss is {', '.join(parts)}; the validation loss is plain cross-entropy, so the two do not "
            "compare."] if is_binary or len(parts) > 1 else []


def validation_samples(run: RunData) -> int:
    return run.run["dataset"]["validation_samples"]


def most_frequent(run: RunData) -> tuple[int, int, int]:
    """Returns (class with the most validation images, their number, number of all images); zeros if unknown."""
    totals = class_totals({(label, predicted): count for label, predicted, count in run.outcomes.get("confusion", ())})
    [(label, most)] = totals.most_common(1) or [(0, 0)]
    return label, most, totals.total()


def advice(run: RunData) -> str:
    """Returns what to try, as a paragraph, or an empty string."""
    sentences = (run.summary or run.divergence or {}).get("advice", ())
    return f'<p>{prose(" ".join(sentences))}</p>' if sentences else ""


def published(run: RunData) -> str:
    """Returns a paragraph: the paper's figure and the flags that differ from its recipe. "" if no figure is known."""
    recipe = run.run["recipe"] or {}
    if not recipe.get("reported"):
        return ""
    differs = run.changes
    noted = f" This run differs from the recipe: {differs}." if differs else " The recipe's flags are unchanged."
    row = f" ({recipe['row']})" if recipe["row"] else ""
    return (f"<p><b>The paper's figure</b>{html.escape(row)}: {html.escape(recipe['reported'])}."
            f'<span class="muted">{prose(noted)}</span></p>')


def storage(run: RunData) -> str:
    """Returns sentences on the data fetched from a bucket or server, and on waiting for it, or an empty string."""
    rows = [row for row in run.times if "storage" in row]
    if not rows:
        return ""
    waited = sum(row["storage"] for row in rows) / len(rows)
    limits = ": storage limits the speed" if waited > STORAGE_LIMITS else ""
    requests, fetched, hits = (sum(row[name] for row in rows) for name in ("requests", "fetched", "hits"))
    window = (f" Workers fetched {fetched / 1e6:,.1f} MB in {plural(requests, 'request')}. "
              f"{hits / (requests + hits):.1%} of the blocks of samples were in the window." if requests + hits else "")
    return f" Waiting for storage took {waited:.1%} of the steps{limits}.{window}"


def state(run: RunData) -> str:
    """Returns the progress of an unfinished run, and why it ended if it did. "" for a finished one."""
    if run.summary is not None:
        return ""
    where = f"epoch {number(round(run.epoch, 2))} of {number(run.epochs)}"
    bar = f'<progress value="{run.epoch}" max="{run.epochs}" aria-label="epochs"></progress>'
    if run.run.get("stopped"):
        reason = prose(run.run["stopped"])
        return f'<div class="status problem"><b>Stopped</b> after {where}: {reason}{bar}</div>'
    if run.state == "killed":
        return ('<div class="status problem"><b>Killed</b> after '
                f"{where}: no process holds the lock on the folder.{bar}</div>")
    left = f", {clock_time(seconds)} left" if (seconds := run.run.get("seconds_left")) else ""
    return (f'<div class="status"><b>In progress</b>: {where}{left}. {since_evaluation(run)}This page, of '
            f"{time.strftime('%Y-%m-%d %H:%M:%S')}, reloads itself.{bar}</div>")


def since_evaluation(run: RunData) -> str:
    """Returns how training has gone since the last evaluation: means over the logged updates. "" without two."""
    rows = [row for row in run.steps if not run.rows or row["epoch"] >= run.rows[-1]["epoch"]]
    seconds = rows[-1]["seconds"] - rows[0]["seconds"] if rows else 0
    if not seconds:
        return ""
    loss, top1 = (math.fsum(row[name] for row in rows) / len(rows) for name in ("loss", "top1"))
    speed = sum((after["step"] - row["step"]) * row["batch_size"] for row, after in pairwise(rows)) / seconds
    when = f"Since epoch {number(run.rows[-1]['epoch'])}" if run.rows else "So far"
    return f"{when}: training loss {number(loss)}, training top-1 {top1:.1%}, {speed:,.0f} images/s. "


def in_words(accuracy: float, samples: int) -> str:
    """Returns the 95 % interval of an accuracy that was measured on so many samples."""
    low, high = interval(accuracy, samples)
    return f"95% interval {low:.1%} to {high:.1%}"


def rounded(accuracy: float, bounds: tuple[float, float]) -> str:
    """Returns an accuracy with as many decimals as its 95 % interval leaves a meaning.

    They are none for an interval of ±11 points, one for ±1 and two for ±0.1 and less. bounds: of the interval.
    """
    half = 50 * (bounds[1] - bounds[0])
    return f"{accuracy:z.{min(2, max(0, 1 - round(math.log10(half)))) if half > 0 else 2}%}"

