"""Do recipes still rehearse as their comments say? `uv run python -m benchmarks.rehearsals [RECIPE ...]`

It rehearses one recipe of each family, or those named, with `experiments.rehearse`, and compares the verdict with the
line "Rehearsed:" of the recipe. Standard output has the lines of JSON. The exit code is 1 if a verdict is another one.
"""
import argparse
import sys
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=FAMILIES)
    parser.add_argument("--output_dir", type=Path, default="runs/rehearsals")
    options = parser.parse_args()
    rows = rehearse.run(["benchmarks.rehearsals", *options.recipes, f"--output_dir={options.output_dir}"])
    if found := changed(rows):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
