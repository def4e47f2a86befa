"""Source: a table of files and labels, such as labels.csv."""
from pathlib import Path

from common.errors import UserError
from data import table as tables
from data.class_names import normal
from data.preparing.team import Team
from data.set_aside import FRACTION, SetAside
from data.sources.image_folder import divided
from data.sources.source import Listed, files


def table(source: Path, fraction: SetAside, team: Team, label_column: str | None = None) -> Listed:
    """Lists the images of a table in the order that they have in folders of classes.

    fraction: fraction of each class for validation, if the table has no validation images. label_column: as in
    `data.table.read`. Raises UserError.
    """
    parts, lines = team.on_rank_0(lambda: _read(source, fraction, label_column))
    labels = {name: label for label, name in enumerate(dict.fromkeys(normal(row.label) for row in parts["train"]))}
    splits = {split: files(str(source.parent), [row.file for row in part], [labels[normal(row.label)] for row in part])
              for split, part in parts.items()}
    for line in lines:
        team.log(line)
    if "validation" not in splits:
        splits = divided(splits["train"], splits["train"].names, fraction)
    return Listed(tuple(labels), splits)


def _read(source, fraction, label_column) -> tuple[dict, list[str]]:
    """Returns what `data.table.read` does. Raises UserError unless there are images for both splits."""
    splits, lines, where = tables.read(source, fraction, label_column)
    if where and not fraction.is_nothing:
        raise UserError(f"--validation_fraction: {source} already has validation images ({where}); remove this flag, "
                        "or the column")
    if not where and fraction.is_nothing:
        raise UserError(f"--source: {source} has no validation images; give the fraction of each class to use for "
                        f"validation, such as --validation_fraction={FRACTION:g}")
    return splits, lines
