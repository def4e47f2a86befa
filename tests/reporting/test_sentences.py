"""Intervals of accuracies in words; what the terminal and the report say of a small set."""
import html
import re

import pytest

from reporting.progress import result_lines
from reporting.report import write_report
from reporting.sentences import in_words
from tests.rigs.run_files import row, whole


def test_no_right_answer_has_no_negative_zero():
    """0 of 18 was one, as with 23 other sizes up to 100."""
    for samples in range(1, 101):
        assert in_words(0.0, samples).startswith("95% interval 0.0% to ")
        assert in_words(1.0, samples).endswith(" to 100.0%")


def summary(hits: int, weakest=()) -> dict:
    """Of 1,000 validation images."""
    return {"val_top1": hits / 1000, "val_top1_count": hits, "val_top5": 0.5, "val_top5_count": 500,
            "val_samples": 1000, "val_guess_count": 100, "val_loss": 2.3, "seconds": 199.0, "balanced_top1": 0.123456,
            "weakest_classes": list(weakest)}


@pytest.mark.parametrize(("hits", "says"), [(107, True), (540, False)])
def test_the_terminal(hits, says):
    [line] = result_lines(summary(hits), 10)
    assert in_words(hits / 1000, 1000) in line and "\n" not in line
    assert ("no better than guessing, which is right on 10.00%" in line) == says


def test_the_terminal_names_the_weakest_classes():
    first, second = ({"class": name, "images": 8, "correct": correct, "recall": correct / 8}
                     for name, correct in (("cat", 1), ("dog", 6)))
    [_, line] = result_lines(summary(540, [first, second]), 10)
    assert line == ("weakest classes: cat 12.5% (1 of 8), dog 75.0% (6 of 8); balanced top-1, the mean over the "
                    "classes, 12.35%")
    [_, line] = result_lines(summary(540, [first]) | {"ema_val_top1": 0.5}, 10)
    assert line.startswith("weakest classes by the average of the weights: cat 12.5% (1 of 8); ")


@pytest.mark.parametrize(("classes", "shown"), [(6, False), (19, False), (20, True)])
def test_the_terminal_explains_top_1_and_shows_top_5_from_20_classes(classes, shown):
    [line] = result_lines(summary(540), classes)
    assert line.startswith("validation: top-1 54.00% (the first guess is right for 540 of 1000, ")
    assert ("top-5 50.00% (500)" in line) == shown


@pytest.mark.parametrize(("top1", "says"), [(0.502, False), (0.2, True)])
def test_the_report(top1, says, tmp_path):
    """50 images; the largest of ten classes has 10 of the 55 in its outcomes.json."""
    folder = whole(tmp_path / "run", rows=[row(epoch, val_top1=top1) for epoch in (1, 2, 3)])
    page = html.unescape(re.sub(r"<(style|script).*?</\1>|<[^>]*>", "", write_report(folder).read_text(), flags=re.S))
    assert f"Top-1: {in_words(top1, 50)}." in page and page.count(in_words(top1, 50)) >= 2  # also in its tile
    assert ("no better than guessing, which is right on 18.18%" in page) == says
