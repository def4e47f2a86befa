"""Two evaluations of the same images, against numbers worked out by hand."""
import csv
import re

import pytest

from common.errors import UserError
from reporting import compare
from reporting.pairs import Counts, comparison, is_evaluation
from reporting.report import main
from reporting.run_data import RunData
from tests.rigs.run_files import whole


def evaluated(folder, verdicts: str, change=lambda rows: None):
    """Writes predictions.csv. verdicts: r or w for each image, of which the last five are of the class "b, c"."""
    folder.mkdir()
    rows = [{"file": f"/images/{number}.jpg", "label": "b, c" if number >= len(verdicts) - 5 else "a",
             "predicted": ""} for number in range(len(verdicts))]
    for row, verdict in zip(rows, verdicts, strict=True):
        row["predicted"] = row["label"] if verdict == "r" else "another"
    change(rows)
    with (folder / "predictions.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    return folder


def test_of_numbers_by_hand():
    """binom(7, 6) + binom(7, 7) = 8 of 128 on each side. d = 5/17, differing 8/17: d ± 1.96 √((8/17 - d²) / 17)."""
    counts = Counts(both=5, first=1, second=6, neither=3)
    assert counts.chance == pytest.approx(2 * 8 / 128)
    assert counts.gain == pytest.approx((5 / 15, -0.000484, 0.588720), abs=1e-6)
    assert Counts(4, 0, 0, 2).chance == 1 and Counts(0, 0, 20, 0).chance == pytest.approx(2 / 2**20)


def test_the_page_and_the_line(tmp_path, capsys, monkeypatch):
    """Of ten of class a, the second gains six and loses one; of five of the other class, none."""
    first = evaluated(tmp_path / "first", "rwwwwwwrrw" + "rrwwr")
    evaluated(tmp_path / "second", "wrrrrrrrrw" + "rrwwr", change=lambda rows: rows.reverse())
    monkeypatch.chdir(tmp_path)
    assert main(["reporting.report", "first", "second"]) == 0
    shown = capsys.readouterr()
    assert shown.err == (
        "Of 15 images, the second is right where the first is wrong: 6; the reverse: 1. If both were equally good, so "
        "large a difference would have a probability of 0.12 (exact McNemar test), so neither is certainly better.\n")
    page = re.sub("<[^>]+>", " ", (tmp_path / "report.html").read_text())
    assert shown.out == f"{tmp_path}/report.html\n"
    for words in ("all 15 40.0% 73.3% +33.3 -0.0 to +58.9", "a 10 30.0% 80.0% +50.0", "b, c 5 60.0% 60.0% +0.0",
                  "1 image that only the first", "6 images that only the second", "/images/6.jpg"):
        assert words in " ".join(page.split()), words
    better = comparison(first, evaluated(tmp_path / "third", "r" * 15))[1]
    assert better.endswith("a probability of 0.0039 (exact McNemar test), so the second is better.")


def test_two_runs_are_compared_image_by_image_too(tmp_path):
    """Those of the same images alone."""
    runs = [evaluated(tmp_path / name, verdicts) for name, verdicts in (
        ("a", "rwwwwwwrrwrrwwr"), ("b", "wrrrrrrrrwrrwwr"), ("c", "r" * 14))]
    for folder in runs:
        whole(folder)
    said = "Of 15 images, the second is right where the first is wrong: 6; the reverse: 1."
    page, other = (compare.comparison([RunData.read(folder) for folder in two])[0] for two in (runs[:2], runs[1:]))
    assert said in page and "image by image" in page and "image by image" not in other


@pytest.mark.parametrize(("change", "message"), [
    (lambda rows: rows.pop(3), "of other images: /images/3.jpg in .*first, but not in .*second"),
    (lambda rows: rows.extend([{**rows[0], "file": "x"}, {**rows[0], "file": "y"}]), "x and 1 more in .*second"),
    (lambda rows: rows[2].update(label="b, c"), "/images/2.jpg is a in .*first, and b, c in .*second")])
def test_other_images_are_refused_by_name(change, message, tmp_path):
    first, second = evaluated(tmp_path / "first", "r" * 9), evaluated(tmp_path / "second", "r" * 9, change)
    with pytest.raises(UserError, match=message):
        comparison(first, second)


def test_what_is_an_evaluation(tmp_path):
    folder = evaluated(tmp_path / "one", "r" * 9)
    assert is_evaluation(folder) and not is_evaluation(tmp_path)
    (folder / "plan.json").touch()
    assert not is_evaluation(folder)
