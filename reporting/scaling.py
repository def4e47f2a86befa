"""The output of launch.scaling: a table of forecasts, published figures next to ours, and a plot of both."""
from pathlib import Path

PLOTS = (".svg", ".png", ".pdf")


def lines(rows: list[dict], published: list[dict]) -> list[str]:
    """Returns the table for a terminal.

    rows: JSON of launch.scaling. published: rows of launch/published.json, with forecast_* if there is a forecast.
    """
    shown = ["workers  all-reduce    grid      step, ms  images/s    efficiency" + "     hours" * ("hours" in rows[0])]
    for row in rows:
        hours = f"  {row['hours']:8.3f}" if "hours" in row else ""
        grid = "x".join(map(str, row["grid"]))
        shown.append(f"{row['workers']:>7,}  {row['allreduce']:<12}  {grid:<8}  {1000 * row['step_seconds']:>8,.1f}  "
                     f"{row['images_per_second']:>9,.0f}  {row['efficiency']:>10.1%}{hours}")
    shown += ["", "published (forecast)"]
    for row in published:
        quantities = [quantity + f" ({ours})" * bool(ours) for quantity, ours in (
            (_rate(row["images_per_second"]), _rate(row.get("forecast_images_per_second"))),
            (_percent(row["efficiency"]), _percent(row.get("forecast_efficiency")))) if quantity]
        shown.append(f"{row['workers']:>7,}  {row['who']:<22} {', '.join(quantities)}; {row['source']}")
    return shown


def plot(path: Path, rows: list[dict], published: list[dict], title: str) -> None:
    """Plots efficiency against workers: one line per all-reduce, one point per published efficiency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for allreduce in dict.fromkeys(row["allreduce"] for row in rows):
        own = [row for row in rows if row["allreduce"] == allreduce]
        axes.plot([row["workers"] for row in own], [row["efficiency"] for row in own], marker=".",
                  label=f"forecast, {allreduce}")
    for who in dict.fromkeys(row["who"] for row in published if row["efficiency"]):
        own = [row for row in published if row["who"] == who and row["efficiency"]]
        axes.plot([row["workers"] for row in own], [row["efficiency"] for row in own], linestyle="", marker="x",
                  label=f"published, {who} ({own[0]['source']})")
    axes.set(xscale="log", xlabel="workers", ylabel="efficiency relative to one node", title=title, ylim=(0, 1.05))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _rate(value):
    return f"{value:,.0f} images/s" if value else ""


def _percent(value):
    return f"{value:.1%}" if value else ""
