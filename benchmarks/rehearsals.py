"""Do recipes still rehearse as their comments say? `uv run python -m benchmarks.rehearsals [RECIPE ...]`

It rehearses one recipe of each family, or those named, with `experiments.rehearse`, and compares the verdict with the
line "Rehearsed:" of the recipe. It takes the flags of experiments.rehearse, too. Standard output
has the lines of JSON. The exit code is 1 if a verdict is another one.
"""
import sys

from common import command
from experiments import rehearse
from plan.recipes import read, recipe_path

FAMILIES = ("lars_1708.03888/table5-alexnet-bn-8192", "sony_1811.05233/table3-experiment4", "sysml18/alexnet-32768",
            "dle/resnet50-2048", "lamb_1904.00962/resnet50-32768", "mlperf/resnet50-b4096")


def changed(rows: list[dict]) -> list[str]:
    """Returns a line for each row of experiments.rehearse whose verdict is not that of its recipe's comment."""
    found = []
    for row in rows:
        said = read(recipe_path(row["recipe"])).get("Rehearsed", "not yet")
        if not said.startswith(row["verdict"].split(":")[0]):
            found.append(f"{row['recipe']}: {row['verdict']}; the recipe says: {said}")
    return found


@command.program("benchmarks.rehearsals", __doc__)
def main(argv) -> int:
    names = () if any(not word.startswith("-") for word in argv[1:]) else FAMILIES
    rows = rehearse.run([*argv, *names])
    found = changed(rows)
    print(*found, f"{len(rows) - len(found)} of {len(rows)} verdicts are as the recipes say", sep="\n", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
