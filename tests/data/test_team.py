"""An error on one rank ends all of them, whatever the others do."""
import re

import pytest
from conftest import run

PROGRAM = """
import sys, time
from common import command
from data.preparing import team as teams

teams.PATIENCE, (hanging, *failing) = 0.5, map(int, sys.argv[1:])
team = teams.Team()

def work(number):
    if number == hanging:
        time.sleep(600)
    for sample in range(3000):
        if number in failing and sample == 10:
            raise ValueError(f"{number} is wrong")
        time.sleep(0.001)
        team.beat(1)

with command.shell("data.prepare", barrier=team.barrier, prints=team.rank == 0) as ending:
    team.work(range(team.size), work)
sys.exit(ending.code)
"""


@pytest.mark.parametrize("hanging, failing", [(1, [0]), (0, [1]), (-1, [0, 1, 2])])
def test_an_error_ends_ranks_that_hang_or_fail_too(hanging, failing):
    done = run("mpirun", 3, "-c", PROGRAM, hanging, *failing, timeout=300, cold=True)
    lines = re.findall("data.prepare: .*", done.stderr)  # prterun can put a byte of its own before what it passes on
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert lines[0] in [f"data.prepare: {number} is wrong" for number in failing]
