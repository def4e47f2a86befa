"""Heat maps as SVG: trust ratios of layers, and the confusion matrix of the classes."""
import html
import itertools
import math
from collections import Counter
from collections.abc import Sequence

from reporting.charts import figure, number, thinned

# Viridis, 12 colours from low to high: equal steps look equal, also to colour-blind readers and in print.
SHADES = ("#440154", "#482173", "#433e85", "#38598c", "#2d708e", "#25858e", "#1e9b8a", "#2bb07f", "#51c56a", "#85d54a",
          "#c2df23", "#fde725")
MOST_COLUMNS = 60
ROW = 13
COLUMN_LABELS = 30
MOST_CLASSES = 50  # of a confusion matrix
MOST_COUNTED = 16  # classes; a larger matrix shows its counts only under the pointer
ROOM = 500  # SVG units; width of a confusion matrix up to which it shows names of more than 14 letters
OPACITIES = 0.1, 0.2, 0.35, 0.5, 0.8, 0.9, 1  # of its cells; the last three are so strong that the text turns
TURNED = 0.8


def trust_ratios(epochs: Sequence[float], ratios: dict[str, Sequence[float | None]],
                 scale: Sequence[float | None] = ()) -> str:
    """Returns a heat map of layers by epochs on a logarithmic scale. ratios: variable -> one value per epoch.

    Cells without a positive, finite value are empty. At most about MOST_COLUMNS epochs are shown. scale: the colours
    span the range of these values. Default: those of this map.
    """
    shown = thinned(len(epochs), MOST_COLUMNS)
    positive = [ratio for ratio in scale or itertools.chain(*ratios.values()) if _positive(ratio)]
    low = min(positive, default=1.0)
    high = max(positive, default=1.0)
    left = 20 + 6 * max(map(len, ratios), default=0)
    width = max(6, min(28, 560 // len(shown)))
    body = []
    for row, (name, values) in enumerate(ratios.items()):
        cells = "".join(
            f'<rect x="{left + column * width}" y="{row * ROW}" width="{width}" height="{ROW}" '
            f'fill="{_shade(values[index], low, high)}"><title>{html.escape(name)}, epoch {number(epochs[index])}: '
            f"{number(values[index])}</title></rect>"
            for column, index in enumerate(shown) if _positive(values[index]))
        body.append(f'<text class="end small" x="{left - 5}" y="{row * ROW + 10}">{html.escape(name)}</text>{cells}')
    below = len(ratios) * ROW
    every = -(-len(shown) * 5 // (4 * 12)) or 1
    body += [f'<text class="middle small" x="{left + (column + 0.5) * width}" y="{below + 13}">'
             f"{number(epochs[index])}</text>" for column, index in [*enumerate(shown)][::every]]
    body.append(f'<text class="middle muted" x="{left + len(shown) * width / 2}" y="{below + 27}">epoch</text>')
    total = left + len(shown) * width + 10
    return _map("Trust ratio of each variable", total, below + COLUMN_LABELS, body, _key(low, high))


def confusion(classes: Sequence[str], counts: dict[tuple[int, int], int]) -> str:
    """Returns the confusion matrix of up to MOST_CLASSES classes. counts: (label, predicted class) -> samples."""
    size = 30 if len(classes) <= MOST_COUNTED else 16
    names = [shortened(name, max(14, min(30, (ROOM - 18 - size * len(classes)) // 7))) for name in classes]
    left = 18 + 7 * max(map(len, names))
    above = 18 if max(map(len, names)) <= 3 else left
    totals = class_totals(counts)
    side = size * len(classes)
    body = [f'<path class="grid" d="M{left} {above}h{side}v{side}h-{side}z"/>']
    for index, name in enumerate(names):
        middle = (index + 0.5) * size
        body.append(f'<text class="end" x="{left - 5}" y="{above + middle + 4}">{html.escape(name)}</text>')
        turn = "" if above == 18 else f' transform="rotate(-90 {left + middle + 4} {above - 6})"'
        anchor = "middle" if above == 18 else ""
        body.append(f'<text class="{anchor}" x="{left + middle + (4 if turn else 0)}" y="{above - 6}"{turn}>'
                    f"{html.escape(name)}</text>")
    for (label, predicted), count in counts.items():
        x = left + predicted * size
        y = above + label * size
        opacity = OPACITIES[math.ceil(len(OPACITIES) * math.sqrt(count / totals[label])) - 1]
        body.append(
            f'<rect class="cell" x="{x}" y="{y}" width="{size}" height="{size}" fill-opacity="{opacity}"><title>'
            f"{html.escape(classes[label])} predicted as {html.escape(classes[predicted])}: {count:,} of "
            f"{totals[label]:,}</title></rect>")
        if len(classes) <= MOST_COUNTED:
            body.append(f'<text class="middle {"turned" if opacity >= TURNED else ""}" x="{x + size / 2}" '
                        f'y="{y + size / 2 + 4}">{count}</text>')
    diagonal = "".join(f"M{left + size * index} {above + size * index}h{size}v{size}h-{size}z"
                       for index in range(len(classes)))
    body.append(f'<path class="diagonal" d="{diagonal}"/>')
    return _map("Confusion matrix, a row for each true class", left + side + 4,
                above + side + 4, body)


def class_totals(counts: dict[tuple[int, int], int]) -> Counter:
    """Returns label -> number of samples. counts: (label, predicted class) -> samples."""
    totals = Counter()
    for (label, _), count in counts.items():
        totals[label] += count
    return totals


def shortened(text: str, most: int = 14) -> str:
    return text if len(text) <= most else text[:most - 1] + "…"


def _map(title, width, height, body, key="") -> str:
    svg = (f'<svg class="wide" style="width:{width}px;min-width:{width}px" viewBox="0 0 {width} {height}" role="img" '
           f'aria-label="{title}">{"".join(body)}</svg>')
    return figure(title, f'<div class="scroll">{svg}</div>{key}', [])


def _positive(value) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _shade(value, low, high) -> str:
    part = math.log(value / low) / math.log(high / low) if high > low else 0.0
    return SHADES[min(len(SHADES) - 1, int(part * len(SHADES)))]


def _key(low, high) -> str:
    return (f'<p class="key">{number(low)} <i style="background:linear-gradient(to right,{",".join(SHADES)})"></i> '
            f"{number(high)} (logarithmic)</p>")
