"""Intervals of accuracies in words; what the terminal and the report say of a small set."""
import html
import json
import re

import pytest

from common.accuracy import interval
from common.files import write_json
from reporting import progress
from reporting.progress import print_result, result_lines
from reporting.report import write_report
from reporting.sentences import in_words, rounded
from tests.rigs.run_files import row, whole
from training.by_class import averages, by_class, effective_samples, weakest


def test_no_right_answer_has_no_negative_zero():
    """0 of 18 was one, as with 23 other sizes up to 100."""
    for samples in range(1, 101):
        assert in_words(0.0, samples).startswith("95% interval 0.0% to ")
        assert in_words(1.0, samples).endswith(" to 100.0%")


def summary(hits: int, weakest=()) -> dict:
    """Of 1,000 validation images."""
    return {"val_top1": hits / 1000, "val_top1_count": hits, "val_top5": 0.5, "val_top5_count": 500,
            "val_samples": 1000, "val_guess_count": 100, "val_loss": 2.3, "seconds": 199.0, "balanced_top1": 0.123456,
            "balanced_samples": 1000.0, "weakest_classes": list(weakest)}


@pytest.mark.parametrize(("hits", "says"), [(107, True), (540, False)])
def test_the_terminal(hits, says):
    [line] = result_lines(summary(hits), 10)
    assert in_words(hits / 1000, 1000) in line and "\n" not in line
    assert ("not certainly better than guessing, which is right on 10.00%" in line) == says


def test_the_terminal_names_the_weakest_classes():
    first, second = ({"class": name, "images": 8, "correct": correct, "recall": correct / 8}
                     for name, correct in (("cat", 1), ("dog", 6)))
    [_, line] = result_lines(summary(540, [first, second]), 10)
    assert line == ("weakest classes: cat: 12.5% (1 of 8), dog: 75.0% (6 of 8); balanced top-1, the mean over the "
                    "classes, 12.3%")
    [_, line] = result_lines(summary(540, [first]) | {"ema_val_top1": 0.5}, 10)
    assert line.startswith("weakest classes by the average of the weights: cat: 12.5% (1 of 8); ")


def test_the_terminal_leads_with_the_best_evaluation():
    """By hand: 540 and 618 of 1,000. The classes are those of the best, whose checkpoint is on disk or not."""
    one, other = ({"class": name, "images": 8, "correct": 1, "recall": 1 / 8} for name in ("cat", "dog"))
    best = {"best_top1": 0.618, "best_epoch": 13, "epochs": 80, "best_checkpoint": "checkpoints/step-00000013",
            "best_weakest_classes": [other], "best_balanced_top1": 0.5, "best_balanced_samples": 1000.0}
    lines = result_lines(summary(540, [one]) | best, 10)
    assert lines[0] == ("best validation, at epoch 13 of 80: top-1 61.80% (618 of 1000, 95% interval 58.7% to 64.8%), "
                        "kept in checkpoints/best")
    assert lines[1].startswith("last validation: top-1 54.00% (the first guess is right for 540 of 1000, ")
    assert lines[2].startswith("weakest classes of the best: dog: 12.5% (1 of 8); ") and lines[2].endswith(" 50.0%")
    assert not result_lines(summary(540) | best | {"best_checkpoint": None}, 10)[0].endswith("best")
    assert result_lines(summary(540, [one]) | best | {"best_top1": 0.54}, 10)[0].startswith("validation: top-1 54.00% ")


def test_the_result_fits_the_terminal(monkeypatch, capsys):
    """Elsewhere, each line stays whole."""
    first = {"class": "a class with a long name", "images": 8, "correct": 1, "recall": 1 / 8}
    lines = result_lines(summary(540, [first] * 3), 10)
    print_result(lines)
    assert capsys.readouterr().err.splitlines() == lines
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    print_result(lines)
    shown = re.sub("\x1b\\[[01]m", "", capsys.readouterr().err).splitlines()
    assert max(map(len, shown)) <= 80 and " ".join(" ".join(shown).split()) == " ".join(lines)


def test_the_terminal_has_views_in_lines_of_their_own():
    found = {"views_val_top1": 0.625, "views_val_top1_count": 625, "views_val_loss": 1.25}
    averaged = {f"ema_{name}": 2 * value for name, value in (found | {"views_val_top1": 0.45}).items()}
    own, *both = (result_lines(summary(540) | more, 10) for more in ({}, found, found | averaged))
    views = "mean of views: top-1 62.50% (625 of 1000), loss 1.2500"
    assert both == [[*own, views], [*own, views, "mean of views by the average of the weights: top-1 90.00% "
                                    "(1250 of 1000), loss 2.5000"]]


@pytest.mark.parametrize(("labels", "predicted", "shown"), [
    ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1], "83%"), (3 * [0] + 1000 * [1], 2 * [0] + 1001 * [1], "83%"),
    ([0] * 1000 + [1] * 1000, [0] * 900 + [1] * 1100, "95.0%")])
def test_balanced_top_1_has_no_more_decimals_than_its_classes_allow(labels, predicted, shown):
    """Recalls of 2/3 and 1, of three and more images; 0.9 and 1, of a thousand each."""
    rows = by_class(labels, predicted, "ab")
    made = averages(rows) | {"balanced_samples": effective_samples(rows), "weakest_classes": weakest(rows)}
    [_, line] = result_lines(summary(540) | made, 10)
    assert line.endswith(f"; balanced top-1, the mean over the classes, {shown}")


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
    assert in_words(top1, 50) in page and "guessing18%" in page
    assert ("This is not certainly better than guessing." in page) == says


def test_each_figure_of_the_result_stands_once(tmp_path):
    """51 of 79 images, and SciPy's interval: 53.6 to 74.2 %. 41 of 79 are of the largest class."""
    rows = [row(epoch, val_top1=right / 79, train_top1=0.98) for epoch, right in ((1, 20), (2, 51), (3, 46))]
    folder = whole(tmp_path / "run", rows=rows)
    for name, changed in {"run.json": {"dataset": {"validation_samples": 79}}, "summary.json": {"val_samples": 79},
                          "outcomes.json": {"confusion": [[0, 0, 41], [1, 0, 33], [1, 1, 5]]}}.items():
        content = json.loads((folder / name).read_text())
        changed = {key: content[key] | value if isinstance(value, dict) else value for key, value in changed.items()}
        write_json(folder / name, content | changed)
    page = write_report(folder).read_text()
    tiles = re.search(r'<dl class="tiles">(.*?)</dl>', page)[1]
    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>(?:<dd>(.*?)</dd>)?", tiles) == [
        ("validation top-1, best, epoch 2", "65%", "95% interval 53.6% to 74.2%"), ("last epoch", "58%", ""),
        ("train minus validation", "+33 points", ""), ("guessing", "52%", "always naming class 0"),
        ("images/s", "125", "")]
    first_screen = page[page.index("<h1>"):page.index("<h2")]
    assert [first_screen.count(figure) for figure in ("58", "65%", "52%", "50%", "30 s")] == [1, 1, 1, 0, 1]


@pytest.mark.parametrize(("accuracy", "samples", "shown"), [  # half of the 95 % interval by hand: 11, 0.93, 0.37, 0.05
    (46 / 79, 79, "58%"), (0.9, 4000, "90.0%"), (0.7634, 50_000, "76.3%"), (0.998, 30_000, "99.80%"),
    (358 / 360, 360, "99.4%"), (1.0, 18, "100%"), (0.0, 1000, "0.00%")])
def test_decimals_follow_the_interval(accuracy, samples, shown):
    assert rounded(accuracy, interval(accuracy, samples)) == shown
