"""The study: the same search for every rule, runs that are not repeated, a page with a table and a plot."""
import json
import math
import subprocess

import pytest

from experiments import study
from reporting.study import write_study


class Peaked(study.Study):
    """A study whose accuracies are a function with one peak, so that the search can be followed."""

    def __init__(self, peak):
        self._peak, self.asked = peak, []

    def top1(self, rule, batch, rates, seeds=1):
        self.asked += rates
        return [[1 / (1 + abs(rate - self._peak))] for rate in rates]


@pytest.mark.parametrize("rule", study.RULES)
@pytest.mark.parametrize("steps", [-3, 0, 2])
def test_the_search_climbs_to_the_peak_from_either_side(rule, steps):
    peak = study.RULES[rule].centre * 2.0 ** steps
    made = Peaked(peak)
    assert made.best_rate(rule, 1024) == peak
    for exponent in (1, 0.5):
        assert {peak * 2.0 ** -exponent, peak * 2.0 ** exponent} <= set(made.asked)  # a worse rate on either side
    assert len({f"{rate:.9g}" for rate in made.asked}) == len({*made.asked})  # none is trained twice


def test_the_search_ends_with_factors_of_the_square_root_of_two():
    centre = study.RULES["lars"].centre
    assert Peaked(centre * math.sqrt(2)).best_rate("lars", 1024) == centre * math.sqrt(2)


def test_a_run_is_made_once_and_again_after_a_stop(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "COMMON", tuple(flag.replace("epochs=20", "epochs=1") for flag in study.COMMON))
    made = study.Study(tmp_path, str(digits))
    half = tmp_path / "lars-256" / "learning_rate=20.0,seed=1"
    (half / "checkpoints").mkdir(parents=True)
    (half / "checkpoints" / "ckpt-1.index").write_text("of a run that was killed")
    [[first, accuracy]] = made.top1("lars", 256, [20.0], seeds=2)
    assert accuracy == json.loads((half / "summary.json").read_text())["val_top1"] > 0 and accuracy != first
    plan = json.loads((half / "plan.json").read_text())
    assert plan["phases"][0]["global_batch_size"] == 256 and plan["peak_learning_rate"] <= 20
    monkeypatch.setattr(subprocess, "Popen", None)  # no training starts
    assert made.top1("lars", 256, [20.0]) == [[first]]


def test_quick_has_a_rate_for_each_of_its_runs():
    assert study.RECORDED.keys() == {(rule, batch) for rule in study.RULES for batch in study.QUICK_BATCHES}


def test_the_page_shows_means_over_seeds(tmp_path):
    rows = [{"rule": rule, "batch": batch, "rate": 0.1, "accuracies": [0.5, 0.7]}
            for rule in ("A", "B") for batch in (64, 1024)]
    page = write_study(tmp_path, rows, 64).read_text()
    assert page.count("60.00%") == 4 and "<svg" in page and "<td>16</td>" in page
    assert json.loads((tmp_path / "study.json").read_text()) == rows
