"""The output of launch.scaling: forecasts and published figures next to ours, as text and as an HTML page.

about: what the forecast is of and what it rests on, name -> text. rows: the JSON of launch.scaling. published: rows of
launch/published.json, with forecast_* if there is a forecast.
"""
from reporting import charts
from reporting.charts import percent
from reporting.page import facts, page, table


def lines(about: dict[str, str], rows: list[dict], published: list[dict]) -> list[str]:
    """Returns the text for a terminal."""
    shown = [f"{name}: {text}" for name, text in about.items()]
    for heading, texts in (("", forecasts(rows)), ("published (forecast)", results(published))):
        widths = {name: max(len(name), *(len(text[name]) for text in texts)) for name in texts[0]}
        shown += ["", heading] if heading else [""]
        shown += ["  ".join(line[name].ljust(widths[name]) for name in widths).rstrip()
                  for line in ({name: name for name in widths}, *texts)]
    return shown


def page_of(about: dict[str, str], rows: list[dict], published: list[dict]) -> str:
    """Returns the page. Cluster, model and assumptions come first."""
    return page("Forecast of the speed of training", [
        facts(about), "<h2>Forecast</h2>", f'<div class="charts">{efficiency(rows, published)}{rates(rows)}</div>',
        table(forecasts(rows)), "<h2>Published, and the forecast for the same cluster</h2>",
        table(results(published), ("source",))])


def forecasts(rows: list[dict]) -> list[dict[str, str]]:
    """Returns the lines of the table: column -> text."""
    shown = [{"workers": f"{row['workers']:,}", "all-reduce": row["allreduce"], "grid": "x".join(map(str, row["grid"])),
              "step, ms": f"{1000 * row['step_seconds']:,.1f}", "images/s": f"{row['images_per_second']:,.0f}",
              "efficiency": f"{row['efficiency']:.1%}"} for row in rows]
    if "hours" in rows[0]:
        with_seconds = min(row["hours"] for row in rows) < 1
        for text, row in zip(shown, rows, strict=True):
            text["h:mm:ss" if with_seconds else "h:mm"] = clock(row["hours"], with_seconds)
    return shown


def clock(hours: float, with_seconds: bool) -> str:
    """Returns a time as h:mm, or as h:mm:ss."""
    minutes, seconds = divmod(round(3600 * hours), 60) if with_seconds else (round(60 * hours), 0)
    return f"{minutes // 60}:{minutes % 60:02}" + f":{seconds:02}" * with_seconds


def results(published: list[dict]) -> list[dict[str, str]]:
    """Returns the lines of the table of published results, with our forecast in brackets."""
    def both(row, quantity, form):
        return " ".join(form.format(value) for form, value in (
            (form, row[quantity]), (f"({form})", row.get(f"forecast_{quantity}"))) if value and row[quantity])

    return [{"workers": f"{row['workers']:,}", "who": row["who"], "images/s": both(row, "images_per_second", "{:,.0f}"),
             "efficiency": both(row, "efficiency", "{:.1%}"), "source": row["source"]} for row in published]


def efficiency(rows: list[dict], published: list[dict]) -> str:
    """Returns efficiency against workers: a line per all-reduce, and dots for published efficiencies."""
    known = [row for row in published if row["efficiency"]]
    by_who = {row["who"]: [other for other in known if other["who"] == row["who"]] for row in known}
    dots = [charts.line(f"published, {who}", own, workers, "efficiency", 100, kind="dots")
            for who, own in by_who.items()]
    return charts.lines("Efficiency relative to one node", "workers", by_allreduce(rows, "efficiency", 100) + dots,
                        show=percent, x_end=max(map(workers, [*rows, *known])), from_zero=True)


def rates(rows: list[dict]) -> str:
    """Returns images/s against workers: a line per all-reduce, and one for an efficiency of 1."""
    most, first = max(map(workers, rows)), rows[0]
    ideal = charts.ideal(most, 1e-3 * first["images_per_second"] / first["workers"] / first["efficiency"])
    return charts.lines("Thousand images/s", "workers", [*by_allreduce(rows, "images_per_second", 1e-3), ideal],
                        x_end=most, from_zero=True)


def by_allreduce(rows: list[dict], column: str, scale: float) -> list[charts.Line]:
    grouped = {row["allreduce"]: [other for other in rows if other["allreduce"] == row["allreduce"]] for row in rows}
    return [charts.line(f"forecast, {allreduce}", own, workers, column, scale) for allreduce, own in grouped.items()]


def workers(row: dict) -> int:
    return row["workers"]
