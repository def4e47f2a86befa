"""Writes launch/recipes/README.md from the recipes: `uv run python -m launch.recipe_list`."""
from pathlib import Path

RECIPES = Path(__file__).parent / "recipes"
PAPERS = {
    "lars_1708.03888": "You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks, arXiv:1708.03888",
    "sysml18": "You, Zhang, Hsieh, Demmel, Keutzer: Speeding up ImageNet Training on Supercomputers, SysML 2018",
    "sony_1811.05233": "Mikami et al.: Massively Distributed SGD, arXiv:1811.05233",
}
INTRODUCTION = """# Recipes

Each is a file of flags: `uv run train.py --flagfile=launch/recipes/PAPER/NAME.flags`, on any number of workers that
divides its batch. `--dry_run --workers=N` shows its plan without the dataset. Without flags, `digits.flags` is read.
The accuracies are those that the papers report. The last column says where each setting is from: the paper's section or
table, a file or the later code of its authors, or open; what was chosen where it is open stands in the recipe.
This page is written from the recipes by `uv run python -m launch.recipe_list`.
"""


def read(path: Path) -> dict:
    """Reads a recipe: its title, the fields of its comment (Row, Reported, Sources, Left open, Workers), its flags."""
    fields, last = {}, "title"
    for line in path.read_text().splitlines():
        if line.startswith("--"):
            name, _, value = line[2:].partition("=")
            fields[name] = value
        elif line.startswith("#   "):
            fields[last] += " " + line[4:]
        elif line.startswith("# "):
            last, separator, value = line[2:].partition(": ")
            if not fields or not separator:
                last, value = "title", line[2:]
            fields[last] = value
    return fields


def rule(fields: dict) -> str:
    """Summarizes the optimizer and the learning-rate schedule."""
    words = [fields["optimizer"].upper(), fields["learning_rate"], fields["lr_schedule"]]
    if "warmup" in fields:
        words.append(f"warm-up {fields['warmup_epochs']} from {fields['warmup_learning_rate']}")
    return ", ".join(words)


def page() -> str:
    lines = [INTRODUCTION]
    for folder, paper in PAPERS.items():
        lines += [f"\n## {paper}\n", "| recipe | row | model | batch | rule | epochs | reported | settings from |",
                  "| --- | --- | --- | --- | --- | --- | --- | --- |"]
        for path in sorted((RECIPES / folder).glob("*.flags"), key=_natural):
            f = read(path)
            lines.append(f"| [{path.stem}]({folder}/{path.name}) | {f['Row']} | {f['model']} | {f['batch_size']} | "
                         f"{rule(f)} | {f['epochs']} | {f['Reported']} | {f['Sources']} |")
    return "\n".join(lines) + "\n"


def _natural(path):
    return [int(word) if word.isdigit() else word for word in path.stem.replace("-", " ").split()]


if __name__ == "__main__":
    (RECIPES / "README.md").write_text(page())
