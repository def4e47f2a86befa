"""What `.ci/night` compares: accuracies with those of an earlier version, verdicts with those of the recipes."""
import statistics

import pytest
from scipy.stats import ttest_ind

from benchmarks import accuracy, rehearsals


def row(top1, optimizer="lars"):
    return {"dataset": "digits", "optimizer": optimizer, "batch_size": 128, "seeds": len(top1),
            "mean": statistics.mean(top1), "deviation": statistics.stdev(top1)}


BEFORE = [0.955, 0.96, 0.962, 0.958, 0.965]


@pytest.mark.parametrize(("now", "is_lower"), [
    ([0.955, 0.96, 0.962, 0.958, 0.965], False),
    ([0.952, 0.957, 0.959, 0.955, 0.962], False),  # within the spread of the seeds
    ([0.925, 0.93, 0.932, 0.928, 0.935], True),
    ([0.985, 0.99, 0.992, 0.988, 0.995], False),  # higher
    ([0.93] * 5, True)])
def test_a_mean_that_is_lower_than_the_seeds_explain_is_named(now, is_lower):
    found = accuracy.lower([row(now), row(BEFORE, "sgd")], [row(BEFORE, "sgd"), row(BEFORE)])
    assert len(found) == is_lower and all(line.startswith("digits lars 128: 93.00%, before 96.00%") for line in found)
    if statistics.stdev(now):  # the test on the samples themselves
        assert (ttest_ind(now, BEFORE, equal_var=False, alternative="less").pvalue < accuracy.CHANCE / 2) == is_lower


def test_a_verdict_that_is_not_the_recipes_is_named():
    rows = [{"recipe": "sysml18/alexnet-32768", "verdict": verdict} for verdict in ("trains", "does not train")]
    [line] = rehearsals.changed(rows)
    assert line.startswith("sysml18/alexnet-32768: does not train; the recipe says: trains, ")
    assert rehearsals.changed([{"recipe": "images", "verdict": "trains"}])  # a recipe that was not rehearsed
