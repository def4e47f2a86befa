"""The part of a run's report on the gradient noise scale: what a batch size is worth."""
import math

from reporting import charts
from reporting.charts import XAxis, number
from reporting.page import details, table
from reporting.run_data import RunData


def noise_scale(run: RunData) -> list[str]:
    """Returns the noise scale and the batch size over the epochs, in words and as a schedule of batch sizes."""
    if not run.noise:
        return []
    certain = [row for row in run.noise if row["noise_scale"] is not None]
    x = XAxis("epoch", end=run.epoch)
    chart = charts.lines("Gradient noise scale, samples", x, [
        charts.line("noise scale", run.noise, x, "noise_scale"),
        charts.line("batch size", run.noise, x, "batch_size", steps=True)], charts.LOGARITHMIC)
    listed = table([{name: value for name, value in row.items() if name != "layers"} for row in run.noise])
    return ["<h2>What a batch size is worth</h2>", f"<p>{sentences(run.noise, certain)}</p>",
            f'<div class="charts">{chart}</div>', details("Estimates", listed)]


def sentences(rows: list[dict], certain: list[dict]) -> str:
    """Returns what the estimates say. certain: those of the rows that have a noise scale."""
    if not certain:
        return (f"In the mean over {rows[-1]['updates']} updates, the gradient drowns in the noise, so the noise scale "
                "is unknown. A longer training measures more of them.")
    last = certain[-1]
    unknown = "" if last is rows[-1] else " Since then, the gradient has drowned in the noise."
    return (f"At epoch {number(last['epoch'])}, the gradient noise is about {about(last['noise_scale'])} samples: "
            "batches up to that size save updates almost in proportion; beyond it they mostly cost more images."
            f"{unknown} Batch sizes that follow it: <code>--batch_size={schedule(certain)}</code>.")


def schedule(certain: list[dict]) -> str:
    """Returns a growing batch size, in powers of two up to the noise scale, as the value of --batch_size."""
    phases = []
    start = size = 0
    for row in certain:
        fitting = 2 ** max(0, math.floor(math.log2(max(1.0, row["noise_scale"]))))
        if fitting > size:
            size = fitting
            phases.append(f"{start:g}:{size}")
        start = row["epoch"]
    return ",".join(phases) if len(phases) > 1 else str(size)


def about(value: float) -> str:
    """Returns a number with two digits."""
    return f"{float(f'{value:.2g}'):,.0f}"
