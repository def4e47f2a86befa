"""Charts as SVG elements. pygal draws them, as it loads and draws within 0.1 s: a user waits for it at a run's end."""
import math

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
LARGEST_LEGEND = 16  # series
MOST_X_LABELS = 12


def curves(title: str, unit: str, epochs: list[float], series: dict[str, list[float | None]], log: bool = False,
           size: tuple[int, int] = (500, 330)) -> str:
    """Returns lines over epochs. series: label -> one value per epoch. None and NaN leave a gap.

    log: use a logarithmic axis for the values. Those that are not above zero then leave a gap, too.
    """
    shown = {label: [_shown(value, log) for value in values] for label, values in series.items()}
    chart = _chart("Line", title, size, epochs, x_title="epoch", y_title=unit, logarithmic=log, dots_size=2,
                   show_legend=1 < len(series) <= LARGEST_LEGEND)
    if log:
        chart.y_labels = _round_numbers([value for values in shown.values() for value in values if value is not None])
    for label, values in shown.items():
        chart.add(label, values, allow_interruptions=True)
    return chart.render(is_unicode=True)


def stacked_bars(title: str, unit: str, epochs: list[float], series: dict[str, list[float]]) -> str:
    """Returns one bar per epoch, with the values of all series on top of each other."""
    chart = _chart("StackedBar", title, (1000, 300), epochs, x_title="epoch", y_title=unit)
    for label, values in series.items():
        chart.add(label, values)
    return chart.render(is_unicode=True)


def bars(title: str, rows: list[tuple[str, float, bool]]) -> str:
    """Returns horizontal bars on a logarithmic axis. rows: (name, value, whether in the second colour), top first."""
    chart = _chart("HorizontalBar", title, (900, 90 + 40 * len(rows)), [], logarithmic=True, show_legend=False,
                   print_values=True, print_values_position="top", formatter=lambda value: f"{value:,.0f}")
    chart.x_labels = [name for name, *_ in reversed(rows)]
    chart.y_labels = _round_numbers([value for _, value, _ in rows])
    chart.add("", [{"value": value, "color": COLOURS[second]} for _, value, second in reversed(rows)])
    return chart.render(is_unicode=True)


def _chart(kind, title, size, epochs, **options):
    import pygal
    from pygal.style import Style

    style = Style(background="transparent", plot_background="transparent", foreground="#444", foreground_strong="#222",
                  foreground_subtle="#bbb", guide_stroke_color="#ddd", major_guide_stroke_color="#ddd",
                  guide_stroke_dasharray="none", major_guide_stroke_dasharray="none", opacity="1", opacity_hover=".7",
                  colors=COLOURS, font_family="system-ui,sans-serif", title_font_size=15, label_font_size=11,
                  major_label_font_size=11, legend_font_size=11, value_font_size=11, tooltip_font_size=11)
    chart = getattr(pygal, kind)(
        title=title, width=size[0], height=size[1], style=style, js=(), margin=8, margin_bottom=20,
        disable_xml_declaration=True, legend_at_bottom=True, legend_box_size=9, show_minor_x_labels=False,
        x_labels_major_every=-(-len(epochs) // MOST_X_LABELS) or 1, **options)
    chart.x_labels = [f"{epoch:g}" for epoch in epochs]
    return chart


def _shown(value, log):
    return None if value is None or not math.isfinite(value) or (log and value <= 0) else value


def _round_numbers(values: list[float]) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten over the range of positive values, or only the powers if it is wide."""
    if not values:
        return []
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    steps = (1, 2, 5) if high - low < 4 else (1,)
    return [step * 10.0 ** power for power in range(low, high + 1) for step in steps
            if min(values) / 2 <= step * 10.0 ** power <= max(values) * 2]
