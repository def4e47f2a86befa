"""The colours of page.css, as readers with and without red-green colour blindness see them, in both themes."""
import itertools
import math
import re

import numpy as np
import pytest
from conftest import ROOT

from reporting import charts, heat_map

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency" (2009):
# the matrices of severity 1.0, for linear RGB.
VISION = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]]}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],  # sRGB, IEC 61966-2-1
                   [0.0193339, 0.1191920, 0.9503041]])


def themes() -> dict[str, dict[str, np.ndarray]]:
    """Theme -> variable -> sRGB, from 0 to 1."""
    rules = re.findall(r":root\{(.*?)\}", (ROOT / "reporting" / "page.css").read_text(), re.DOTALL)
    return {theme: {name: np.array([int(2 * part if len(value) == 3 else part, 16) / 255
                                    for part in re.findall("." * (len(value) // 3), value)])
                    for name, value in re.findall(r"--(\w+):#([0-9a-f]{3}(?:[0-9a-f]{3})?)[;}]", rule + ";")}
            for theme, rule in zip(("light", "dark"), rules, strict=True)}


def linear(colour):
    return np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIELAB (D65) of linear RGB."""
    ratios = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(ratios > 216 / 24389, np.cbrt(ratios), (24389 / 27 * ratios + 16) / 116)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def delta_e_2000(one, other) -> float:
    """Sharma, Wu and Dalal, "The CIEDE2000 Color-Difference Formula" (2005), equations 2 to 22. Arguments: CIELAB."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(mean**7 / (mean**7 + 25**7)))
    a1, a2 = (1 + g) * a1, (1 + g) * a2
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = 0 if not c1 * c2 else (h2 - h1 + 180) % 360 - 180 if abs(h2 - h1) != 180 else h2 - h1
    d_h = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2))
    h = h1 + h2 if not c1 * c2 else (h1 + h2) / 2 if abs(h1 - h2) <= 180 else (
        (h1 + h2 + 360) / 2 if h1 + h2 < 360 else (h1 + h2 - 360) / 2)
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    t = (1 - 0.17 * math.cos(math.radians(h - 30)) + 0.24 * math.cos(math.radians(2 * h))
         + 0.32 * math.cos(math.radians(3 * h + 6)) - 0.2 * math.cos(math.radians(4 * h - 63)))
    s_l = 1 + 0.015 * (lightness - 50)**2 / math.sqrt(20 + (lightness - 50)**2)
    s_c, s_h = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    rotation = -math.sin(math.radians(60 * math.exp(-((h - 275) / 25)**2))) * 2 * math.sqrt(
        chroma**7 / (chroma**7 + 25**7))
    parts = (l2 - l1) / s_l, (c2 - c1) / s_c, d_h / s_h
    return math.sqrt(sum(part**2 for part in parts) + rotation * parts[1] * parts[2])


def contrast(one, other) -> float:
    """WCAG 2.2, "contrast ratio" of two sRGB colours."""
    low, high = sorted(float(np.dot(TO_XYZ[1], linear(colour))) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("one", "other", "difference"), [  # pairs 1, 7, 16 and 25 of Sharma's table 1
    ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425), ((50, 0, 0), (50, -1, 2), 2.3669),
    ((50, 2.5, 0), (50, 0, -2.5), 4.3065), ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644)])
def test_the_formula_gives_the_published_differences(one, other, difference):
    assert delta_e_2000(one, other) == pytest.approx(difference, abs=1e-4)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", [None, *VISION])
def test_all_pairs_of_lines_differ(theme, vision):
    colours = themes()[theme]
    matrix = np.array(VISION[vision]) if vision else np.eye(3)
    seen = [lab(matrix @ linear(colours[f"c{number}"])) for number in range(charts.COLOURS)]
    found = {(one, other): delta_e_2000(seen[one], seen[other])
             for one, other in itertools.combinations(range(charts.COLOURS), 2)}
    assert min(found.values()) >= 10, min(found, key=found.get)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_and_text_stand_out(theme):
    """Lines from the page 3:1 (WCAG 1.4.11), text from the page and from the cells of a matrix 4.5:1 (1.4.3)."""
    colours = themes()[theme]
    assert min(contrast(colours[f"c{number}"], colours["page"]) for number in range(charts.COLOURS)) >= 3
    assert min(contrast(colours[name], colours["page"]) for name in ("text", "muted", "accent")) >= 4.5
    for opacity in heat_map.OPACITIES:
        cell = opacity * colours["cell"] + (1 - opacity) * colours["page"]
        assert contrast(cell, colours["page" if opacity >= heat_map.TURNED else "text"]) >= 4.5, opacity
