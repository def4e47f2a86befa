"""What a chart shows, counted by hand."""
import math
import re
from xml.etree import ElementTree

import pytest

from reporting import charts


def shown(svg: str, kind: str) -> int:
    """How many elements of a class there are; the SVG has to be well-formed, and to fetch nothing."""
    assert not re.search(r"""(src|href)=["'](?!#)""", svg)
    return sum(kind in element.get("class", "").split() for element in ElementTree.fromstring(svg).iter())


@pytest.mark.parametrize("log, dots", [(False, 5), (True, 4)])
def test_what_is_not_a_number_or_has_no_logarithm_leaves_a_gap(log, dots):
    series = {"train": [2.0, None, 0.0, 1e-3], "<&>": [math.nan, 7, 8, math.inf]}
    svg = charts.curves("Loss", "nats", [1, 2, 3, 3.5], series, log)
    assert shown(svg, "dot") == dots
    assert "Loss" in svg and "nats" in svg and "&lt;&amp;&gt;" in svg and ">3.5<" in svg


def test_a_diverged_run_without_any_number():
    assert shown(charts.curves("Loss", "nats", [1], {"train": [None]}, log=True), "dot") == 0


def test_bars():
    assert shown(charts.stacked_bars("Time", "share", [1, 2], {"a": [0.5, 0.25], "b": [0.5, 0.75]}), "bar") == 4
    svg = charts.bars("images/s", [("read", 90_000.0, False), ("model", 300.0, True)])
    assert shown(svg, "bar") == 2 and "90,000" in svg and charts.COLOURS[1] in svg


def test_the_round_numbers_of_an_axis():
    assert charts._round_numbers([0.3, 4.0]) == pytest.approx([0.2, 0.5, 1, 2, 5])
    assert charts._round_numbers([1e-5, 1.0]) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1])
