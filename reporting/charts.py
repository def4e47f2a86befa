"""Charts as SVG in HTML figures. The colours are CSS variables of page.css, so that a page can be light or dark.

Every point has a <title>, which browsers show as a tooltip. page.js replaces it by one that touch screens show, too.
"""
import html
import math
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

WIDTH, HEIGHT = 300, 210  # SVG units; about the pixels of a phone, or a quarter of the page, so text stays legible
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 38
COLOURS = 10  # --c0 to --c9 in page.css
MARKERS = "", "m-2.3-2.3h4.6v4.6h-4.6z", "m0-3.2l3 5.2h-6z", "m0-3.2l3.2 3.2l-3.2 3.2l-3.2-3.2z"  # paths; "": a circle
LONGEST = 8  # characters of a label of the vertical axis
MOST_POINTS = 150  # per line
MOST_DOTS = 40  # a line with more points shows them only under the pointer
MOST_BARS = 40
WHOLE = ("epoch", "workers")  # horizontal axes whose ticks are whole numbers


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]  # None and numbers that are not finite leave a gap
    colour: int | None = None  # number of a colour; None: the line's index in the chart
    # "": a line with dots; "dashed" (a plan), "faint" (noisy values) and "interval": without dots, and an interval
    # may end in arrows outside of the chart; "dots": no line; "rest": grey, for lines beyond those that colours can
    # tell.
    kind: str = ""
    steps: bool = False  # whether each value holds until the next x, instead of a straight line to the next value
    ring: float | None = None  # x of a point with a ring
    clipped: bool = False  # whether the highest and lowest values may lie outside of the chart
    has_key: bool = True  # whether the legend names it


@dataclass(frozen=True)
class XAxis:
    """A horizontal axis."""

    title: str
    of: Callable[[dict], float] = operator.itemgetter("epoch")  # returns the x of a row
    end: float | None = None  # the axis goes from 0 to here; None: from the first to the last point
    ticks: Sequence[tuple[float, str]] = ()  # (x, label); empty: round numbers


@dataclass(frozen=True)
class YAxis:
    """A vertical axis."""

    show: Callable[[float | None], str]  # returns the label of a value
    log: bool = False  # whether the axis is logarithmic; values that are not above 0 then leave a gap, too
    from_zero: bool = False  # whether the axis starts at 0


def line(label: str, rows: Sequence[dict], x: XAxis, y: str | Callable[[dict], float | None], **options) -> Line:
    """Returns a line with a point per row. y: a function of a row, or a key that a row may lack."""
    return Line(label, [x.of(row) for row in rows], [y(row) if callable(y) else row.get(y) for row in rows], **options)


def number(value) -> str:
    """Returns a number as text: about four digits, thousands separated; other values as they are."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "not a number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, float) and not 1000 <= abs(value) < 1e9:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 10_000 or value == round(value) else f"{value:,.1f}"


def percent(value) -> str:
    """Returns a fraction as text."""
    return number(value) if value is None else f"{100 * value:.4g}%"


NUMBERS = YAxis(number)
LOGARITHMIC = YAxis(number, log=True)
FROM_ZERO = YAxis(number, from_zero=True)
PERCENT = YAxis(percent)


def lines(title: str, x: XAxis, series: Sequence[Line], y: YAxis = NUMBERS, has_legend: bool = True,
          empty: str = "no finite value") -> str:
    """Returns a figure of lines. has_legend: whether it names several lines below the chart. empty: without values."""
    drawn = [_shown(line, position, y.log) for position, line in enumerate(line for line in series if len(line.x))]
    values = [value for line in drawn for value in _deciding(line)]
    points = sorted(end for line in drawn for end in (line.x[0], line.x[-1])) or [0, 1]
    first, last = (0, x.end) if x.end else (points[0], points[-1])
    margin = 0 if x.end else 0.04 * (last - first)
    low, high, y_ticks = _scale(values, y)
    across = _axis(first - margin, max(last, first + 1e-9) + margin, LEFT, WIDTH - RIGHT)
    height = _axis(low, high, HEIGHT - BOTTOM, TOP, y.log)

    def down(value) -> float:  # a value outside lies on the edge
        return height(min(max(value, low), high))

    x_ticks = x.ticks or [(tick, number(tick)) for tick in ticks(first, last, 6, x.title in WHOLE)]
    named = dict(x.ticks)
    body = [_labels_below([(across(tick), text) for tick, text in x_ticks], x.title)]
    if values:
        body.insert(0, _grid(height, y_ticks, y.show))
    else:
        body.append(f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" class="middle">{html.escape(empty)}</text>')
    ends = []
    for line in drawn:
        points = [(left, value) for left, value in zip(line.x, line.y, strict=True) if value is not None]
        ends += [f"{line.label} {y.show(points[-1][1])}"] if points else []
        dots = "".join(
            _marker(line.colour, across(left), down(value), "ring" * (left == line.ring),
                    _title(f"{line.label}: {y.show(value)} ({x.title} {named.get(left, number(left))})"))
            for left, value in points)
        has_dots = line.kind == "dots" or len(points) == 1 or (not line.kind and len(points) <= MOST_DOTS)
        dots += "".join(_arrow(across(left), down(value), value > high) for left, value in points
                        if line.kind == "interval" and not low <= value <= high)
        body.append(f'<g class="line c{line.colour % COLOURS} {line.kind} {"" if has_dots else "hidden"}">'
                    f'<path d="{"" if line.kind == "dots" else _path(line, across, down)}"/>{dots}</g>')
    named_lines = [line for line in drawn if line.has_key]
    keys = [(line.label, line.colour, line.kind) for line in named_lines] if len(named_lines) > 1 and has_legend else []
    label = f"{title}, by {x.title}" + (f"; at the end: {', '.join(ends)}" if ends else "")
    return figure(title, _svg(label, WIDTH, HEIGHT, body, "lines"), keys)


def _deciding(line: Line) -> list[float]:
    """Returns the values that have to lie inside of the chart."""
    if line.kind == "interval":
        return []
    values = sorted(value for value in line.y if value is not None)
    outside = len(values) // 20 if line.clipped else 0
    return values[outside:len(values) - outside]


def stacked_bars(title: str, x_title: str, x: Sequence[float | str], series: dict[str, Sequence[float]]) -> str:
    """Returns a figure with one bar per x that shows fractions of 1, stacked. Many bars are averaged in groups."""
    group = -(-len(x) // MOST_BARS) or 1
    starts = range(0, len(x), group)
    across = _axis(0, len(starts), LEFT, WIDTH - RIGHT)
    down = _axis(0, 1, HEIGHT - BOTTOM, TOP)
    width = across(1) - across(0)
    body = [_grid(down, [0, 0.25, 0.5, 0.75, 1], "{:.0%}".format)]
    bases = [0.0] * len(starts)
    for colour, (label, values) in enumerate(series.items()):
        for bar, start in enumerate(starts):
            mean = statistics.fmean(value or 0.0 for value in values[start:start + group])
            bottom = down(min(1, bases[bar]))
            bases[bar] += mean
            top = down(min(1, bases[bar]))
            tip = _title(f"{x_title} {number(x[start])}: {label} {mean:.1%}")
            body.append(f'<rect class="bar c{colour % COLOURS}" x="{across(bar) + 0.08 * width:.1f}" y="{top:.1f}" '
                        f'width="{0.84 * width:.1f}" height="{max(0, bottom - top):.1f}">{tip}</rect>')
    every = -(-len(starts) // 8) or 1
    labels = [(across(bar + 0.5), number(x[start])) for bar, start in enumerate(starts) if bar % every == 0]
    body.append(_labels_below(labels, x_title))
    return figure(title, _svg(f"{title}, by {x_title}", WIDTH, HEIGHT, body),
                  [(label, colour, "bars") for colour, label in enumerate(series)])


def bars(title: str, rows: Sequence[tuple[str, float, bool]]) -> str:
    """Returns horizontal bars. rows: (name, value, whether in the second colour), top first."""
    longest = max(value for _, value, _ in rows)
    lines = "".join(f'<dt>{html.escape(name)}</dt><dd><i class="c{int(second)}" '
                    f'style="width:{85 * value / longest:.2f}%"></i>{value:,.0f}</dd>' for name, value, second in rows)
    return figure(title, f'<dl class="bars">{lines}</dl>', [])


def forest(title: str, rows: Sequence[tuple[str, float, float, float, str]], marks: Sequence[tuple[str, float]]) -> str:
    """Returns values with their intervals, one below the other. rows: (name, value, low, high, text), top first.

    marks: (label, value) of vertical lines. The first is inside of the plot, and others that are far away at its edge.
    """
    ends = [*(end for _, _, *bounds, _ in rows for end in bounds), marks[0][1]]
    at = _axis(min(ends), max(ends), 2, 98)  # in percent of the width
    lines = "".join(f'<b style="left:{min(max(at(value), 0), 100):.2f}%" class="c{colour}"></b>'
                    for colour, (_, value) in enumerate(marks))
    body = "".join(
        f'<dt>{html.escape(name)}</dt><dd><span>{lines}'
        f'<i style="left:{at(low):.2f}%;width:{at(high) - at(low):.2f}%"></i>'
        f'<u style="left:{at(value):.2f}%"></u></span><small>{html.escape(text)}</small></dd>'
        for name, value, low, high, text in rows)
    return figure(title, f'<dl class="forest">{body}</dl>',
                  [(label, colour, "mark") for colour, (label, _) in enumerate(marks)])


def figure(title: str, content: str, keys: Sequence[tuple[str, int, str]]) -> str:
    """Returns a figure with a caption and a legend. keys: (label, number of the colour, kind of a line)."""
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{content}{legend(keys)}</figure>"


def legend(keys: Sequence[tuple[str, int, str]]) -> str:
    """Returns the meaning of colours. keys: (label, number of the colour, kind of a line)."""
    drawn = {"bars": '<rect class="bar" width="26" height="10"/>', "dots": "", "mark": '<path d="M13 0V10"/>'}
    items = "".join(
        f'<li><svg viewBox="0 0 26 10" aria-hidden="true"><g class="line c{colour % COLOURS} {kind}">'
        + drawn.get(kind, '<path d="M0 5H26"/>') + _marker(colour, 13, 5) * (kind in ("", "dots"))
        + f"</g></svg>{html.escape(label)}</li>" for label, colour, kind in keys)
    return f'<ul class="legend">{items}</ul>' if items else ""


def ticks(low: float, high: float, most: int = 5, least: float = 0) -> list[float]:
    """Returns the ticks of a linear axis: multiples of 1, 2 or 5 times a power of ten, about `most` of them.

    least: smallest distance between two.
    """
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(least, next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999))
    first = math.ceil(low / step - 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns the ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, or the powers alone if there are many.

    If fewer than three lie between low and high, the ticks are those of a linear axis.
    """
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first < 4 else (1,)
    every = max(1, (last - first) // 8)
    found = [factor * 10.0 ** power for power in range(first, last + 1, every) for factor in factors
             if low * 0.999 <= factor * 10.0 ** power <= high * 1.001]
    return found if len(found) >= 3 else ticks(low, high, 8)


def thinned(count: int, most: int) -> list[int]:
    """Returns about `most` of the indices below `count`: every n-th, and the last."""
    return sorted({*range(0, count, -(-count // most) or 1), *range(count)[-1:]})


def _scale(values, y: YAxis) -> tuple[float, float, list[float]]:
    """Returns the ends of a vertical axis and its ticks."""
    low = min(values, default=1.0)
    high = max(values, default=1.0)
    if y.log:
        margin = 1.25 if high < 1.6 * low else 1.05
        return low / margin, high * margin, log_ticks(low / margin, high * margin)
    pad = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    low = 0.0 if y.from_zero else low - pad if low < 0 or low > 0.5 * high else -0.02 * high
    high += pad
    return low, high, ticks(low, high, 6)


def _axis(low, high, start, end, log=False) -> Callable[[float], float]:
    """Returns a function from a value to its coordinate, where low lies at `start` and high at `end`."""
    scale = math.log if log else float
    length = (scale(high) - scale(low)) or 1.0
    return lambda value: start + (end - start) * (scale(value) - scale(low)) / length


def _shown(line: Line, position: int, log: bool) -> Line:
    """Returns a line with a colour and at most about MOST_POINTS points. Values that the axis cannot show are None."""
    kept = sorted({*thinned(len(line.x), MOST_POINTS), *(point for point, x in enumerate(line.x) if x == line.ring)})
    values = [None if value is None or not math.isfinite(value) or (log and value <= 0) else value
              for value in (line.y[point] for point in kept)]
    return replace(line, x=[line.x[point] for point in kept], y=values,
                   colour=position if line.colour is None else line.colour)


def _path(line: Line, across, down) -> str:
    words = []
    command = "M"
    for x, y in zip(line.x, line.y, strict=True):
        if y is None:
            command = "M"
            continue
        if line.steps and command == "L":
            words.append(f"H{across(x):.1f}")
        words.append(f"{command}{across(x):.1f} {down(y):.1f}")
        command = "L"
    return "".join(words)


def _marker(colour: int, x: float, y: float, kind: str = "", title: str = "") -> str:
    """Returns a point: a circle on the first two lines, then also a square, a triangle and a diamond."""
    shape = MARKERS[max(0, colour % COLOURS - 1) % len(MARKERS)]
    if shape:
        return f'<path class="dot {kind}" d="M{x:.1f} {y:.1f}{shape}">{title}</path>'
    return f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">{title}</circle>'


def _arrow(x: float, y: float, is_up: bool) -> str:
    """Returns the head of an arrow at the end of a line that goes on outside of the chart."""
    return f'<path class="arrow" d="M{x - 3:.1f} {y:.1f}h6l-3 {-5 if is_up else 5}z"/>'


def _grid(down, y_ticks, show) -> str:
    labels = [(down(tick), text if len(text := show(tick)) <= LONGEST else f"{tick:.3g}") for tick in y_ticks]
    return "".join(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
                   f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{text}</text>' for y, text in labels)


def _labels_below(labels, x_title) -> str:
    """Returns texts below the horizontal axis, without those that would overlap the one to their left."""
    shown = []
    end = -math.inf
    for x, text in sorted(labels):
        half = 3.5 * len(text)
        middle = min(x, WIDTH - half)  # inside of the chart
        if middle - half >= end:
            shown.append(f'<text class="middle" x="{middle:.1f}" y="{HEIGHT - 22}">{html.escape(text)}</text>')
            end = middle + half
    return "".join(shown) + (
        f'<text class="middle muted" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}">{html.escape(x_title)}</text>')


def _svg(label, width, height, body, kind="") -> str:
    return (f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label)}">'
            f'{"".join(body)}</svg>')


def _title(text) -> str:
    return f"<title>{html.escape(text)}</title>"
