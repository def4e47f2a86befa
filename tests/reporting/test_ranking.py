"""Which setting is the best: against published intervals, SciPy's, a simulation, and the issue's example by hand."""
import math
import re
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy import stats

from common import command
from experiments import sweep
from reporting import ranking
from reporting import sweep as sweep_page
from reporting.ranking import UNKNOWN_SPREAD, best_of, by_mean, differences, judgement, reported, settings


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
    assert said["sentence"] == (
        "Too close to call: the mean top-1 is 24% with learning rate 2, 21% with learning rate 10 and 19% "
        "with learning rate 5. The lead of learning rate 2 is 2 points (95% interval -76 to 80). "
        "Even 100 seeds of each may not tell; more validation images may. The highest is at the "
        "edge of the grid: add learning rate 0.8.")
    assert said["add"] == {"learning_rate": 0.8}


@pytest.mark.parametrize(("number", "lead"), [(2, 0.01), (3, 0.01)])
def test_who_adds_the_seeds_is_told_in_about_80_percent(number, lead):
    """Sweeps of two settings with a standard deviation of 0.01, on so many images that these tell all."""
    random, told = np.random.default_rng(0), []
    for _ in range(200):
        first = 0.5 + lead * np.arange(2)[:, None] + 0.01 * random.standard_normal((2, number))
        if not (more := judged(dict(enumerate(first)), 10**7)["more_seeds"]):
            continue
        added = 0.5 + lead * np.arange(2)[:, None] + 0.01 * random.standard_normal((2, more))
        told.append(len(judged(dict(enumerate(np.hstack([first, added]))), 10**7)["best"]) == 1)
    assert len(told) > 100 and statistics.fmean(told) >= 0.75


def test_the_number_of_seeds_against_drawn_ones():
    """Deviation and means are drawn from what the first seeds leave open, with SciPy; then the seeds that are added."""
    seen = {1: (0.80, 0.81, 0.82), 2: (0.82, 0.83, 0.855)}
    said = judged(seen, 10**7)
    assert (f"About {said['more_seeds']} more seeds of each would tell with a probability of 80%." in said["sentence"])
    variance = 4 / stats.chi2.rvs(4, size=20000, random_state=0)
    chance = {}
    for more in (said["more_seeds"] - 1, said["more_seeds"]):
        first = np.array([np.mean(seen[2]), np.mean(seen[1])])
        deviation = np.sqrt(variance) * np.array([[np.std(seen[2], ddof=1)], [np.std(seen[1], ddof=1)]])
        means = first[:, None] + deviation / math.sqrt(3) * stats.norm.rvs(size=(2, 20000), random_state=1)
        added = means + deviation / math.sqrt(more) * stats.norm.rvs(size=(2, 20000), random_state=2)
        lead = np.subtract(*(3 * first[:, None] + more * added) / (3 + more))
        half = stats.t.ppf(0.975, 2 + more) * np.hypot(*deviation) / math.sqrt(3 + more)
        chance[more] = np.mean(abs(lead) > half)
    lower, upper = chance.values()
    assert lower - 0.01 < 0.8 < upper + 0.01 and lower < upper


def test_seeds_do_not_tell_what_the_images_do_not():
    """On 360 images, the interval of 86 to 88 % over images alone includes 0; it does not on 10,000."""
    seeds = {1: (0.86, 0.861, 0.859), 2: (0.88, 0.881, 0.879)}
    assert "Even 100 seeds of each may not tell; more validation images may." in judged(seeds)["sentence"]
    assert judged(seeds, 10000)["best"] == [{"learning_rate": 2}]


@pytest.mark.parametrize(("seeds", "right"), [((0.5, 0.6), 550), ((0.5, 0.51, 0.55), 520), ((0.8, 0.8, 0.8), 800)])
def test_the_interval_of_a_mean_adds_the_variances_of_seeds_and_images(seeds, right):
    """Student's and Wilson's of SciPy, and its definition. Three equal seeds count as half an image apart."""
    [setting] = settings(rows({1: seeds}, 1000))
    images = stats.binomtest(right, 1000).proportion_ci(method="wilson")
    student = stats.t.ppf(0.975, len(seeds) - 1) * max(np.std(seeds, ddof=1), 0.0005) / math.sqrt(len(seeds))
    mean = right / 1000
    assert setting.interval == pytest.approx((mean - math.sqrt(student**2 + (mean - images.low) ** 2),
                                              mean + math.sqrt(student**2 + (images.high - mean) ** 2)))
    assert setting.scope() == f"{min(seeds):.2%} to {max(seeds):.2%}"


@pytest.mark.parametrize(("one", "other", "bounds"), [  # Newcombe 1998, Statistics in Medicine 17, table II, method 10
    ((56, 70), (48, 80), (0.0524, 0.3339)), ((9, 10), (3, 10), (0.1705, 0.8090)), ((6, 7), (2, 7), (0.0582, 0.8062))])
def test_two_runs_are_compared_by_newcombes_interval(one, other, bounds):
    better, worse = (settings(rows({1: [hits / of]}, of))[0] for hits, of in (one, other))
    assert better.lead(worse) == pytest.approx((one[0] / one[1] - other[0] / other[1], *bounds), abs=5e-5)
    assert worse.lead(better)[1:] == pytest.approx([-bound for bound in reversed(bounds)], abs=5e-5)
    assert better.lead_over(worse) == better.lead(worse)[1]
    assert better.scope().endswith("% (95% interval)")


@pytest.mark.parametrize("number", [2, 3, 6])
def test_equal_settings_are_told_apart_in_at_most_5_percent(number):
    draws = 0.7 + 0.02 * np.random.default_rng(1).standard_normal((200, 2, number))
    wrong = [len(judged({1: list(one), 2: list(other)}, 10**7)["best"]) == 1 for one, other in draws]
    assert statistics.fmean(wrong) <= 0.05


@pytest.mark.parametrize("number", [3, 6])
def test_equal_settings_are_told_apart_on_few_images_in_at_most_5_percent(number):
    """All seeds of a setting are right on the same 85 % of 79 images, but for 3 %. So 85 % is right on any others."""
    random = np.random.default_rng(0)
    draws = [(random.random((2, 1, 79)) < 0.85) ^ (random.random((2, number, 79)) < 0.03) for _ in range(100)]
    wrong = [len(judged(dict(enumerate(draw.mean(axis=2))), 79)["best"]) == 1 for draw in draws]
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
        "A tie: the top-1 of learning rate 1 and learning rate 2 is 40%. More seeds may tell.")
    assert len(judged({1: (356 / 360,) * 2, 2: (355 / 360,) * 2})["best"]) == 2  # no spread at all, by chance


def test_single_runs_are_not_called():
    """Two equal settings, whose seeds have a standard deviation of half a point, on 10,000 images."""
    draws = 0.75 + 0.005 * np.random.default_rng(0).standard_normal((50, 2))
    said = [judged({1: [one], 2: [other]}, 10000) for one, other in draws]
    assert all(one["more_seeds"] is None and UNKNOWN_SPREAD in one["sentence"] for one in said)
    assert judged({2: [0.9], 1: [0.5]})["sentence"].startswith(
        "The highest top-1, that of learning rate 2, is 90.0%, from 86.5% to 92.7% (95% interval) in 1 run. "
        "It leads learning rate 1 by 40 points (95% interval 34 to 46). "
        f"{UNKNOWN_SPREAD} The highest is at the edge")
    assert judged({1: [0.9]})["sentence"] == "The top-1 is 90.0%, from 86.5% to 92.7% (95% interval) in 1 run."
    assert UNKNOWN_SPREAD in judged({1: [0.9, 0.91], 2: [0.5]})["sentence"]


def diverged(rate: float) -> dict:
    return {"flags": {"learning_rate": rate}, "diverged": True, "val_top1": 0.1, "folder": f"{rate}"}


def test_a_sweep_that_guesses_is_said_to():
    """24 of 79 images are of the most frequent class; the means are 31.65 and 29.75 %."""
    grid = settings([row | {"val_guess_count": 24} for row in rows({1: (25 / 79, 25 / 79), 2: (23 / 79, 24 / 79)}, 79)])
    assert judgement(grid, grid) == {"best": [], "more_seeds": None, "add": {}, "sentence":
        "The highest top-1, 32%, is at the level of guessing, which is right on 30%."}
    grid = settings([row | {"val_guess_count": 24} for row in rows({1: (0.6, 0.8)}, 79)])  # Student's has 0
    assert judgement(grid, grid)["sentence"] == "The mean top-1 is 70%, from 60% to 80% in 2 runs."
    grid = settings([diverged(1), *rows({2: (0.1, 0.08)})])
    assert judgement(grid, grid)["sentence"] == (
        "The highest top-1, 9%, is at the level of guessing, which is right on 10%.")


@pytest.mark.parametrize("seeds", [(0.089, 0.072), (0.15, 0.35), (0.0,)])
def test_a_setting_that_diverged_is_never_better_than_another(seeds):
    """It counts with 0.1. Of two seeds, Student's interval reaches from far below to far above."""
    grid = settings([diverged(1), diverged(1), *rows({2: seeds, 4: (0.05,)}), diverged(8)])
    *_, worst = sorted(grid, key=lambda one: one.rank, reverse=True)
    best = max(grid, key=lambda one: one.rank)
    assert best.flags == {"learning_rate": 2 if sum(seeds) > 0.05 else 4} and worst.has_diverged
    assert [one.flags["learning_rate"] for one in sorted(grid, key=lambda one: one.rank)][:2] == [1, 8]
    said = judgement(grid, grid)
    assert all(one["learning_rate"] in (2, 4) for one in said["best"])
    assert not said["best"] or "learning rate 8" not in said["sentence"]


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_is_compared_if_all_diverged(number):
    grid = settings([diverged(rate) for rate in range(number)])
    assert judgement(grid, grid)["sentence"] == "Every run that has ended diverged."
    grid = settings([diverged(1), *rows({2: (0.8, 0.82)})])
    assert judgement(grid, grid)["sentence"].startswith(
        "The highest mean top-1, that of learning rate 2, is 81%, from 80% to 82% in 2 runs.")


TEN = {"classes": 10, "samples": 360, "class_names": "a", "images": "b"}


@pytest.mark.parametrize(("other", "differ"), [
    ({"classes": 2, "samples": 90, "class_names": "c", "images": "d"},
     "the number of classes, the number of images, class names and images"),
    ({"images": "d"}, "images"), ({"class_names": "c"}, "class names"), ({}, "")])
def test_runs_on_different_images_are_not_ranked(other, differ):
    """A run of an older version knows less of its set, and a folder of images knows names in place of checksums."""
    for one, two in ((TEN, TEN | other), (TEN | {"files": "x"}, {"classes": 10, "samples": 360} | other)):
        grid = settings([row | {"validation": known} for row, known in zip(
            rows({1: (0.5, 0.51), 2: (0.9, 0.91)}), (one, one, two, two), strict=True)])
        said = judgement(grid, grid)
        assert said["best"] == ([] if differ else [{"learning_rate": 2}])
        assert not differ or said["sentence"] == (
            f"The runs are not ranked, because their validation sets differ in {differ}.")


VALUES = st.one_of(st.sampled_from([0, 0.1, 1e-4, 1, 2, 1e30, "0:1,5:2", "sgd"]), st.booleans())
ROWS = st.lists(st.fixed_dictionaries({
    "flags": st.dictionaries(st.sampled_from(["learning_rate", "weight_decay", "optimizer", "data_dir"]), VALUES),
    "seed": st.integers(0, 2), "val_top1": st.floats(0, 1), "diverged": st.booleans(), "folder": st.just("a"),
    "val_samples": st.sampled_from([None, 1, 79]), "val_guess_count": st.sampled_from([None, 1]),
    "ema_val_top1": st.sampled_from([None, 0.5]), "best_top1": st.floats(0, 1), "seconds": st.floats(0, 1e4),
    "best_epoch": st.sampled_from([None, 1]), "diverged_at": st.sampled_from([None, {"epoch": 0.5}]),
    "final": st.booleans(), "validation": st.sampled_from([{}, TEN])}), max_size=6)


@hypothesis_settings(max_examples=60, deadline=None)
@given(ROWS)
def test_any_rows_have_a_judgement_a_table_and_plots(found):
    said, *_ = sweep_page.judged(found)
    assert "could not be judged" not in said["sentence"] and "from  in" not in said["sentence"]
    assert set(map(str, said["best"])) <= {str(row["flags"]) for row in found}


def test_a_setting_without_a_flag_of_the_others_is_judged():
    """--optimizer=sgd beside lines with a --weight_decay."""
    flags = [{"optimizer": "sgd"}, *({"optimizer": "sgd", "weight_decay": value} for value in (0.001, 0.1))]
    found = settings([row | {"flags": own} for own, row in zip(flags, rows({1: [0.9], 2: [0.5], 3: [0.4]}),
                                                               strict=True)])
    said = judgement(found, found)
    assert said["best"] == [{"optimizer": "sgd"}] and said["add"] == {}



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
    assert said["add"] == {} and "that of learning rate 4, optimizer lars, is 90.0%" in said["sentence"]


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
    assert judgement([], settings(rows({1: [0.1]})))["sentence"] == "No final run has ended yet."
    assert judgement([], settings([diverged(1), diverged(2)]))["sentence"] == "Every run that has ended diverged."


def test_a_person_gets_a_table_and_the_sentence(tmp_path, monkeypatch, capsys):
    """Not the JSON that programs get. The trainings are emulated."""
    result = sweep.Result(0.5, None, 0.5, 1, 61.0, None, None, 360)
    monkeypatch.setattr(sweep, "Result", SimpleNamespace(read=lambda folder: result))
    monkeypatch.setattr(command, "is_read_by_a_person", lambda: True)
    assert sweep.main(["sweep", "--sweep=learning_rate=2,5", "--seeds=2", f"--output_dir={tmp_path}"]) == 0
    shown = capsys.readouterr()
    assert [line.split("  ")[0] for line in shown.out.splitlines()] == ["learning_rate", "2", "5"]
    assert "50% to 50%" in shown.out and "{" not in shown.out
    sentence = "A tie: the mean top-1 of learning rate 2 and learning rate 5 is 50%. More seeds may tell."
    said, again, report = shown.err.splitlines()[-3:]
    assert (said, report) == (sentence, f"report: {tmp_path}/sweep.html")
    assert again.startswith("its command: uv run train.py ") and " --learning_rate=2 " in again
    assert sentence in (tmp_path / "sweep.html").read_text() and sentence in (tmp_path / "best.json").read_text()
    assert ranking.NOTE in (tmp_path / "sweep.html").read_text()


def test_the_differences_are_drawn_with_the_reported_figure():
    """By hand: 60, 58 and 50 % of 1,000 images, the paper has 59 %, and the highest stands at 0."""
    runs = [row | {"reported": "top-1 59.0 %, mean of 5", "folder": name} for name, row in zip(
        "abc", rows({1: [0.6], 2: [0.58], 4: [0.5]}, 1000), strict=True)]
    grid = settings(runs)
    drawn = differences(by_mean(grid, judgement(grid, grid)))
    assert re.findall("<dt>(.*?)</dt>", drawn) == ["learning rate 2", "learning rate 4"]
    texts = re.findall(r"<small>(\S+) \((\S+) to (\S+)\)</small>", drawn)
    assert [float(lead) for lead, *_ in texts] == [-2, -10]
    places = {name: [float(place) for place in re.findall(rf'<{name} style="left:([\d.]+)%', drawn)] for name in "biu"}
    assert places["b"][:2] == places["b"][2:] and places["b"][0] > places["b"][1]  # the highest, and the paper
    scale = (places["b"][0] - places["b"][1]) / 1  # percent of the width for a point
    for mark, low, (lead, least, _) in zip(places["u"], places["i"], texts, strict=True):
        assert mark - places["b"][0] == pytest.approx(scale * float(lead), abs=0.6 * scale)
        assert low - places["b"][0] == pytest.approx(scale * float(least), abs=0.6 * scale)
    assert re.findall("</svg>(.*?)</li>", drawn) == ["learning rate 1", "reported, -1.0"]
    assert differences(grid[:1]) == "" and reported([{"reported": "top-1 59 %"}, {"reported": None}]) is None


def test_nothing_is_bold_where_it_is_too_close_to_call():
    for accuracies, best in (({1: [0.6], 2: [0.59]}, None), ({1: [0.6], 2: [0.3]}, 0)):
        grid = settings(rows(accuracies, 1000))
        assert best_of(grid, judgement(grid, grid)) == best
