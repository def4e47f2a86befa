"""Writes docs/flags.md, the page of all flags: `uv run python -m docs.flag_list`."""
from pathlib import Path

from common import flags
from plan.flags import GROUPS, define

PAGE = Path(__file__).parent / "flags.md"
INTRODUCTION = """# All flags of train.py

`uv run train.py --help` shows the flags that most people need, `--helpfull` all of them. `--flagfile=FILE` reads flags
from a file, one per line. Without it, a recipe in `recipes/` is read first: `digits.flags`, or with `--data_dir`
`small_images.flags` for less than 50,000 training images and `images.flags` otherwise. Flags on the command line take
precedence. A line on standard error names a flag that has no effect in combination with the others, such as
`--warmup_epochs` with `--warmup=none`.

`uv run python -m docs.flag_list` writes this page from `plan/settings.py`.
"""
TITLES = {"Recipe": "What to train: the recipe", "Launch": "What to train on: the launch", "Run": "How to run it"}


def page() -> str:
    values, lines = define(), [INTRODUCTION]
    for name, group in GROUPS.items():
        lines += [f"\n## {TITLES[name]}\n", "| flag | default | meaning |", "| --- | --- | --- |"]
        lines += [row(values[flag]) for flag in flags.names(group)]
    return "\n".join(lines) + "\n"


def row(flag) -> str:
    (meaning, choices), default = flags.explained(flag), flags.default_text(flag)
    listed = f" Values: {', '.join(f'`{one}`' for one in choices)}." if choices else ""
    name = f'<span id="{flag.name}">`--{flag.name}`</span>'
    return f"| {name} | {f'`{default}`' if default else ''} | {meaning}{listed} |"


if __name__ == "__main__":
    PAGE.write_text(page())
