"""Which setting is the best: against published intervals, SciPy's, a simulation, and the issue's example by hand."""
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from common import command
from experiments import sweep
from reporting import ranking
from reporting.ranking import judgement, settings


def rows(top1: dict, samples: int = 360, name: str = "learning_rate") -> list[dict]:
    """top1: value of the flag -> the top-1 of each seed."""
    return [{"flags": {name: value}, "val_top1": one, "val_samples": samples, "folder": f"{value}"}
            for value, seeds in top1.items() for one in seeds]


def judged(top1: dict, samples: int = 360, name: str = "learning_rate") -> dict:
    grid = settings(rows(top1, samples, name))
    return judgement(grid, grid)


ISSUE = {2: (0.2333, 0.2417), 5: (0.1139, 0.2611), 10: (0.2750, 0.1528)}


def test_the_issues_example():
    """The best run has rate 10, the best mean rate 2, and no rate is better than the others."""
    said = judged(ISSUE)
    assert said["best"] == [{"learning_rate": rate} for rate in (2, 10, 5)]
    assert said["sentence"].startswith("Too close to call: the mean top-1 is 23.75% with learning rate 2, 21.39% with "
                                       "learning rate 10 and 18.75% with learning rate 5. About ")
    assert said["sentence"].endswith("The highest is at the edge of the grid: add learning rate 0.8.")
    assert said["add"] == {"learning_rate": 0.8}


def seeds_like(mean: float, deviation: float, number: int) -> list[float]:
    """So many values with exactly this mean and standard deviation."""
    values = np.linspace(-1, 1, number)
    return list(mean + deviation * values / values.std(ddof=1))


def test_so_many_more_seeds_tell():
    """As many seeds with the same means and deviations are enough, and one less is not."""
    more = judged(ISSUE)["more_seeds"]
    likes = {rate: (statistics.fmean(top1), statistics.stdev(top1)) for rate, top1 in ISSUE.items()}
    said = [judged({rate: seeds_like(*like, 2 + number) for rate, like in likes.items()})
            for number in (more, more - 1)]
    assert [len(one["best"]) for one in said] == [1, 2] and said[0]["more_seeds"] is None
    assert said[0]["sentence"].startswith("The highest mean top-1, that of learning rate 2, is 23.75%, from ")


def test_seeds_that_rule_one_out_are_told_where_none_would_tell_the_others():
    """Seven more seeds like these rule out rate 20, and six do not."""
    seen = {2: (0.3, 0.3667), 5: (0.3028, 0.35), 10: (0.1556, 0.5389), 20: (0.1194, 0.15)}
    said = judged(seen)
    assert said["more_seeds"] is None and len(said["best"]) == 4
    assert "About 7 more seeds of each would rule out learning rate 20; 100 would not tell the others apart." in (
        said["sentence"])
    likes = {rate: (statistics.fmean(top1), statistics.stdev(top1)) for rate, top1 in seen.items()}
    best = [judged({rate: seeds_like(*like, 2 + more) for rate, like in likes.items()})["best"] for more in (6, 7)]
    assert [{"learning_rate": 20} in one for one in best] == [True, False]


@pytest.mark.parametrize("seeds", [(0.5, 0.6), (0.5, 0.51, 0.55), (0.8, 0.81, 0.82, 0.79, 0.9)])
def test_the_interval_of_a_mean_is_students(seeds):
    [setting] = settings(rows({1: seeds}))
    expected = stats.ttest_1samp(seeds, 0).confidence_interval(0.95)
    assert setting.interval == pytest.approx((expected.low, expected.high))
    assert setting.scope == f"{min(seeds):.2%} to {max(seeds):.2%}"


@pytest.mark.parametrize(("one", "other", "lower"), [  # Newcombe 1998, Statistics in Medicine 17, table II, method 10
    ((56, 70), (48, 80), 0.0524), ((9, 10), (3, 10), 0.1705), ((6, 7), (2, 7), 0.0582)])
def test_two_runs_are_compared_by_newcombes_interval(one, other, lower):
    better, worse = (settings(rows({1: [hits / of]}, of))[0] for hits, of in (one, other))
    assert better.lead_over(worse) == pytest.approx(lower, abs=5e-5)
    assert better.scope.endswith("% (95% interval)")


@pytest.mark.parametrize("number", [2, 3, 6])
def test_equal_settings_are_told_apart_in_at_most_5_percent(number):
    draws = 0.7 + 0.02 * np.random.default_rng(1).standard_normal((400, 2, number))
    wrong = [len(judged({1: list(one), 2: list(other)})["best"]) == 1 for one, other in draws]
    assert statistics.fmean(wrong) <= 0.05


def test_overlapping_ranges_of_few_seeds_are_too_close_and_clear_ones_are_not():
    rng = np.random.default_rng(2)
    for number in (2, 3):
        for one, other in rng.uniform(0.3, 0.6, (100, 2, number)):
            if max(min(one), min(other)) <= min(max(one), max(other)):
                assert len(judged({1: list(one), 2: list(other)})["best"]) == 2
    assert judged({5: (0.844, 0.847, 0.839), 20: (0.782, 0.777, 0.786)})["best"] == [{"learning_rate": 5}]


def test_a_tie_is_one_and_an_image_is_no_difference():
    assert judged({1: [0.4], 2: [0.4], 3: [0.1]})["sentence"] == (
        "A tie: the top-1 of learning rate 1 and learning rate 2 is 40.00%. More seeds may tell.")
    assert len(judged({1: (356 / 360,) * 2, 2: (355 / 360,) * 2})["best"]) == 2  # no spread at all, by chance
    assert "100 seeds would not tell" in judged({1: [0.5], 2: [0.501]})["sentence"]


@pytest.mark.parametrize(("name", "values", "best", "add"), [
    ("learning_rate", (2, 5, 10), 10, 20), ("learning_rate", (2, 5, 10), 5, None), ("learning_rate", (5,), 5, None),
    ("learning_rate", (5, 1e30), 5, 0.5),
    ("weight_decay", (0, 1e-4), 1e-4, 2e-4), ("weight_decay", (0, 1e-4), 0, None),
    ("learning_rate", ("0:1,30:2", 4, 8), 4, 2), ("batch_size", (64, 256), 64, None)])
def test_a_best_value_at_the_edge_asks_for_the_next_one(name, values, best, add):
    said = judged({value: [0.9 if value == best else 0.1] for value in values}, name=name)
    assert said["best"] == [{name: best}] and said["add"] == ({name: add} if add else {})
    assert ("edge of the grid" in said["sentence"]) == bool(add)


def test_the_edge_is_that_of_the_grid_with_the_other_flags():
    grid = [row | {"flags": row["flags"] | {"optimizer": optimizer}} for optimizer, top1 in (
        ("sgd", {0.1: [0.1], 0.2: [0.2]}), ("lars", {2: [0.3], 4: [0.9], 8: [0.3]})) for row in rows(top1)]
    said = judgement(settings(grid), settings(grid))
    assert said["add"] == {} and "that of learning rate 4, optimizer lars, is 90.00%" in said["sentence"]


def test_names_are_the_fewest_flags_or_the_folder_if_they_are_long():
    flags = [{"optimizer": "lars", "momentum": 0.9, "learning_rate": 5}, {"optimizer": "sgd", "momentum": 0.8}]
    assert [one.name for one in settings([row | {"flags": own} for own, row in zip(
        flags, rows({1: [0.1], 2: [0.2]}), strict=True)])] == ["optimizer lars, learning rate 5", "optimizer sgd"]
    assert settings(rows({"x" * 80: [0.1]}))[0].name == "x" * 80  # the folder's
    assert settings([row | {"flags": {}} for row in rows({1: [0.1]})])[0].name == "1"


def test_a_run_that_diverged_counts_with_the_accuracy_of_guessing():
    said = judged({1: [0.12], 2: [0.1]}, samples=None)
    assert said["best"] == [{"learning_rate": 1}] and math.isclose(settings(rows({1: [0.1]}, None))[0].mean, 0.1)


def test_nothing_has_ended():
    assert judgement([], []) == {"sentence": "No run has ended yet.", "best": [], "more_seeds": None, "add": {}}


def test_a_person_gets_a_table_and_the_sentence(tmp_path, monkeypatch, capsys):
    """Not the JSON that programs get. The trainings are emulated."""
    result = sweep.Result(0.5, None, 0.5, 1, 61.0, None, None, 360)
    monkeypatch.setattr(sweep, "Result", SimpleNamespace(read=lambda folder: result))
    monkeypatch.setattr(command, "is_read_by_a_person", lambda: True)
    assert sweep.main(["sweep", "--sweep=learning_rate=2,5", "--seeds=2", f"--output_dir={tmp_path}"]) == 0
    shown = capsys.readouterr()
    assert [line.split("  ")[0] for line in shown.out.splitlines()] == ["learning_rate", "2", "5"]
    assert "50.00% to 50.00%" in shown.out and "{" not in shown.out
    sentence = "A tie: the mean top-1 of learning rate 2 and learning rate 5 is 50.00%. More seeds may tell."
    assert shown.err.splitlines()[-2:] == [sentence, f"report: {tmp_path}/sweep.html"]
    assert sentence in (tmp_path / "sweep.html").read_text() and sentence in (tmp_path / "best.json").read_text()
    assert ranking.NOTE in (tmp_path / "sweep.html").read_text()
