"""Each test belongs to one run: the default one, the one that .ci/run adds, or one of its own in CONTRIBUTING.md."""
import itertools
import re
import tomllib

import pytest
from _pytest.mark.expression import Expression
from conftest import ROOT, TIERS

OPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
[DEFAULT] = re.findall(r"-m '([^']*)'", OPTIONS["addopts"])
[ADDED] = re.findall(r"pytest -m '([^']*)'", (ROOT / ".ci" / "run").read_text())
APART = {mark.partition(":")[0] for mark in OPTIONS["markers"]} - {*TIERS, "gpu"}  # without a GPU, gpu's are skipped


def selects(expression: str, marks: set[str]) -> bool:
    return Expression.compile(expression).evaluate(lambda name, **_: name in marks)


@pytest.mark.parametrize("tier", [None, *TIERS])
def test_the_default_run_and_what_ci_adds_have_each_test_once(tier):
    """tests/conftest.py refuses a test of two tiers."""
    for marks in itertools.chain.from_iterable(itertools.combinations(APART, size) for size in range(len(APART) + 1)):
        found = [selects(expression, {tier, *marks}) for expression in (DEFAULT, ADDED)]
        assert found == [not marks and tier is None, not marks and tier is not None], marks


def test_every_other_mark_has_a_command():
    commands = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(APART) >= 4 and all(f"pytest -m {mark}" in commands for mark in (*APART, "gpu"))
