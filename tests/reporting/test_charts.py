"""What a chart shows, counted and computed by hand."""
import math
import re
from xml.etree import ElementTree

import pytest

from reporting import charts, heat_map
from reporting.charts import FROM_ZERO, LOGARITHMIC, NUMBERS, Line, XAxis

EPOCH = XAxis("epoch")


def elements(figure: str, name: str) -> list:
    """The elements of a name; the figure has to be well-formed, and to fetch nothing."""
    assert not re.search(r"""(src|href)=["'](?!#)""", figure)
    has_values = "circle", "rect"  # but in a legend
    return [element for element in ElementTree.fromstring(figure).iter()
            if element.tag == name and (name not in has_values or element.find("title") is not None)]


@pytest.mark.parametrize("log, dots", [(False, 5), (True, 4)])
def test_what_is_not_a_number_or_has_no_logarithm_leaves_a_gap(log, dots):
    series = [Line("train", [1, 2, 3, 3.5], [2.0, None, 0.0, 1e-3]),
              Line("<&>", [1, 2, 3, 3.5], [math.nan, 7, 8, math.inf])]
    figure = charts.lines("Loss", EPOCH, series, LOGARITHMIC if log else NUMBERS)
    assert len(elements(figure, "circle")) == dots
    assert "Loss" in figure and "epoch" in figure and "&lt;&amp;&gt;: 7 (epoch 2)" in figure and "(epoch 3.5)" in figure


def test_a_run_without_any_number():
    for series in ([], [Line("train", [1], [None])]):
        figure = charts.lines("Loss", EPOCH, series, LOGARITHMIC)
        assert not elements(figure, "circle") and "no finite value" in figure


def test_a_single_evaluation():
    [dot] = elements(charts.lines("Loss", EPOCH, [Line("train", [1], [2.5])]), "circle")
    assert dot.find("title").text == "train: 2.5 (epoch 1)"


@pytest.mark.parametrize("log, values", [(False, [10.0, 20.0, 40.0]), (True, [1.0, 10.0, 1000.0])])
def test_points_lie_where_their_values_are(log, values):
    """The second of three values lies a third of the way, on an axis of either kind; and time goes to the right."""
    dots = elements(charts.lines("", EPOCH, [Line("", [0, 1, 2], values)], LOGARITHMIC if log else NUMBERS), "circle")
    heights = [float(dot.get("cy")) for dot in dots]
    assert heights[0] - heights[1] == pytest.approx((heights[0] - heights[2]) / 3, abs=0.1) and heights[0] > heights[2]
    across = [float(dot.get("cx")) for dot in dots]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.1) and across == sorted(across)


def test_a_planned_value_holds_until_the_next():
    [path] = [path for path in elements(charts.lines("", EPOCH, [Line("", [0, 5], [64, 128], steps=True)]), "path")
              if path.get("class") is None]
    assert re.fullmatch(r"M\S+ (\S+)H\S+L\S+ (?!\1)\S+", path.get("d"))


def test_long_runs_are_thinned_to_their_first_and_last_points():
    dots = elements(charts.lines("", EPOCH, [Line("", range(10_000), [1.0] * 10_000)]), "circle")
    assert len(dots) <= charts.MOST_POINTS + 1
    assert "(epoch 0)" in dots[0].find("title").text and "(epoch 9,999)" in dots[-1].find("title").text


def test_stacked_bars_fill_their_share():
    bars = elements(charts.stacked_bars("Time", "epoch", [1, 2], {"a": [0.5, 0.25], "b": [0.5, 0.75]}), "rect")
    heights = [float(bar.get("height")) for bar in bars]
    full = charts.HEIGHT - charts.BOTTOM - charts.TOP
    assert heights == pytest.approx([full / 2, full / 4, full / 2, 3 * full / 4], abs=0.11)
    assert [bar.find("title").text for bar in bars][-1] == "epoch 2: b 75.0%"


def test_many_bars_are_averaged():
    bars = elements(charts.stacked_bars("Time", "epoch", range(80), {"a": [0.2, 0.4] * 40}), "rect")
    assert len(bars) == 40 and {bar.find("title").text.split()[-1] for bar in bars} == {"30.0%"}


def test_bars():
    figure = charts.bars("images/s", [("read", 90_000.0, False), ("model", 300.0, True)])
    widths = [float(bar.get("style").removeprefix("width:").removesuffix("%")) for bar in elements(figure, "i")]
    assert widths[0] == pytest.approx(300 * widths[1], rel=0.05) and "90,000" in figure and 'class="c1"' in figure


def test_the_round_numbers_of_an_axis():
    assert charts.log_ticks(0.2, 5.0) == pytest.approx([0.2, 0.5, 1, 2, 5])
    assert charts.log_ticks(1e-5, 1.0) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1])
    assert len(charts.log_ticks(1e-30, 1e30)) < 10
    assert charts.ticks(0, 12, 6) == [0, 2, 4, 6, 8, 10, 12] and charts.ticks(0.1, 0.35) == [0.1, 0.15, 0.2, 0.25, 0.3,
                                                                                           0.35]
    assert charts.ticks(3, 3) == [3] and charts.ticks(0, 3, 6, least=1) == [0, 1, 2, 3]


def test_a_logarithmic_axis_has_three_ticks_or_more():
    """Also if its ends are close to each other, which no power of ten or 2 or 5 times one may lie between."""
    for low in (1.2e-13, 0.011, 0.9, 1.1, 2.01, 6.3, 1e5):  # the first: one of a million images has a loss
        for ratio in (1.5, 1.9, 3, 4.4, 9, 99, 1.01e4, 1e9):
            ticks = charts.log_ticks(low, ratio * low)
            assert 3 <= len(ticks) <= 14 and low * 0.999 <= ticks[0] < ticks[-1] <= ratio * low * 1.001, (low, ratio)


def test_all_charts_of_a_run_have_one_horizontal_range():
    """From 0 to the given end, in whole epochs, whatever the points are."""
    figure = charts.lines("Loss", XAxis("epoch", end=4), [Line("", [1, 2], [1.0, 2.0])])
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    assert [float(dot.get("cx")) for dot in elements(figure, "circle")] == pytest.approx(
        [left + (right - left) / 4, left + (right - left) / 2], abs=0.1)
    below = [text.text for text in elements(figure, "text") if text.get("class") == "middle"]
    assert below == ["0", "1", "2", "3", "4"]


def test_an_axis_from_zero():
    figure = charts.lines("images/s", XAxis("workers", end=2), [
        Line("", [1, 2], [90.0, 100.0]), Line("ideal", [0, 2], [0.0, 200.0])], FROM_ZERO)
    first, second, origin, most = elements(figure, "circle")
    assert float(origin.get("cy")) == charts.HEIGHT - charts.BOTTOM and float(origin.get("cx")) == charts.LEFT
    assert float(most.get("cy")) < float(second.get("cy")) and most.find("title").text == "ideal: 200 (workers 2)"
    assert (charts.HEIGHT - charts.BOTTOM - float(first.get("cy"))) / (
        charts.HEIGHT - charts.BOTTOM - float(second.get("cy"))) == pytest.approx(0.9, abs=0.01)


def test_a_reader_hears_what_a_chart_shows():
    for figure in (charts.lines("A < B", EPOCH, [Line("", [1], [1.0])]),
                   charts.stacked_bars("A < B", "epoch", [1], {"a": [1.0]}), heat_map.confusion(["a"], {(0, 0): 1}),
                   heat_map.trust_ratios([0], {"a": [1.0]})):
        [named] = [svg for svg in elements(figure, "svg") if svg.get("role") == "img"]
        assert named.get("aria-label").startswith(("A < B", "Confusion matrix", "Trust ratio"))


@pytest.mark.parametrize("value, text", [
    (None, "not a number"), (math.nan, "not a number"), (1437, "1,437"), (0.123456, "0.1235"), (1234.56, "1,234.6"),
    (34816.0, "34,816"), (1e30, "1e+30"), (-2e9, "-2e+09"),
    (2_000_000_000, "2,000,000,000"), (1e-5, "1e-05"), ("lars", "lars"), (True, "True")])
def test_numbers_as_text(value, text):
    assert charts.number(value) == text


def test_trust_ratios_from_dark_to_light():
    """161 layers over 90 epochs; the lowest, the middle (of the logarithms) and the highest in the first three rows."""
    ratios = {f"layer_{number}/kernel": [0.01] * 90 for number in range(161)}
    ratios["layer_1/kernel"], ratios["layer_2/kernel"] = [1.0] * 90, [100.0] * 89 + [None]
    figure = heat_map.trust_ratios([*range(90)], ratios)
    cells = [cell for cell in elements(figure, "rect") if cell.find("title") is not None]
    columns = sum("layer_0/" in cell.find("title").text for cell in cells)
    assert columns <= heat_map.MOST_COLUMNS + 1 and len(cells) == 161 * columns - 1  # None leaves a hole
    shades = [next(heat_map.SHADES.index(cell.get("fill")) for cell in cells
                   if f"layer_{row}/" in cell.find("title").text) for row in range(3)]
    assert shades == [0, len(heat_map.SHADES) // 2, len(heat_map.SHADES) - 1]


def test_a_confusion_matrix():
    counts = {(0, 0): 7, (0, 1): 3, (1, 1): 5}
    cells = elements(heat_map.confusion(["cat", "<dog>"], counts), "rect")
    assert [cell.find("title").text for cell in cells] == [
        "cat predicted as cat: 7 of 10", "cat predicted as <dog>: 3 of 10", "<dog> predicted as <dog>: 5 of 5"]
    opacities = [float(cell.get("fill-opacity")) for cell in cells]
    assert opacities[1] < opacities[0] < opacities[2]
    turned = [text.text for text in elements(heat_map.confusion(["a", "b"], counts), "text")
              if "turned" in text.get("class")]
    assert turned == ["7", "5"]  # white on dark


def test_labels_of_large_values_fit_beside_the_axis():
    """Eight characters of 11.5 units are narrower than the margin; the point under the pointer has all digits."""
    figure = charts.lines("Learning rate", EPOCH, [Line("as run", [0, 1], [0.0, 2_500_000.0])])
    labels = [text.text for text in elements(figure, "text") if text.get("class") == "end"]
    assert "1e+06" in labels and max(map(len, labels)) <= 8 and "as run: 2,500,000 (epoch 1)" in figure
    assert ">800,000<" in charts.lines("", EPOCH, [Line("", [0, 1], [0.0, 900_000.0])])


def test_from_the_third_line_on_markers_differ_also_in_the_legend():
    """Two circles, then a square, a triangle and a diamond, and the four again."""
    figure = charts.lines("", EPOCH, [Line(str(line), [0], [line]) for line in range(charts.COLOURS)])
    shapes = [re.findall(rf'<g class="line c{line} .*?<(circle|path) class="dot "(?: d="M[^m]*(m.*?)")?', figure)
              for line in range(charts.COLOURS)]
    assert all(len(found) == 2 and found[0] == found[1] for found in shapes)  # in the chart and in the legend
    first, second, *rest = (found[0] for found in shapes)
    assert first == second == rest[3] == ("circle", "") and rest[4:] == rest[:4]
    assert [drawn.count("l") + drawn.count("h") + drawn.count("v") + 1 for _, drawn in rest[:3]] == [4, 3, 4]  # corners
    assert len({*rest[:4]}) == 4
