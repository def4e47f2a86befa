"""Compares two evaluations of the same images, or the best ones of two runs, image by image: by predictions.csv."""
import contextlib
import csv
import html
import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from common.accuracy import QUANTILE
from common.errors import UserError, plural
from common.run_folder import PLAN, PREDICTIONS
from reporting.page import details, html_table, page

MOST = 200  # files in a list
CERTAIN = 0.05  # level of the test


class Counts(NamedTuple):
    """Numbers of images: those that both, the first alone, the second alone and neither classify rightly."""

    both: int
    first: int
    second: int
    neither: int

    @property
    def chance(self) -> float:
        """The exact McNemar test's p-value: the probability of at least this difference if both were equally good.

        Source: McNemar, "Note on the sampling error of the difference between correlated proportions", 1947, with the
        binomial distribution instead of its approximation.
        """
        from scipy.special import bdtr

        return min(1.0, 2 * float(bdtr(min(self.first, self.second), self.first + self.second, 0.5)))

    @property
    def gain(self) -> tuple[float, float, float]:
        """The second's accuracy minus the first's, and the ends of its 95 % interval.

        Source: Agresti and Min, "Simple improved confidence intervals for comparing matched proportions", 2005: that of
        Wald after half an image has been added to each of the four numbers.
        """
        images = sum(self) + 2
        middle, differing = (self.second - self.first) / images, (self.first + self.second + 1) / images
        half = QUANTILE * math.sqrt((differing - middle**2) / images)
        return (self.second - self.first) / sum(self), max(-1.0, middle - half), min(1.0, middle + half)


def is_evaluation(folder) -> bool:
    """Whether a folder is that of --mode=evaluate --output_dir, and not of a run."""
    return (Path(folder) / PREDICTIONS).is_file() and not (Path(folder) / PLAN).exists()


def comparison(first, second) -> tuple[str, str]:
    """Returns the page that compares the evaluations in two folders, and its first sentence. Raises UserError."""
    said, sections = image_by_image(first, second)
    return page("Two evaluations of the same images", [f'<p class="result">{html.escape(said)}</p>', *sections]), said


def of_runs(first, second) -> list[str]:
    """Returns a section that compares the best evaluations of two runs, or nothing if they are of other images."""
    with contextlib.suppress(UserError, OSError):  # an older run, or one without an evaluation
        said, sections = image_by_image(first, second)
        return ["<h2>The best of each, image by image</h2>", f"<p>{html.escape(said)}</p>", *sections]
    return []


def image_by_image(first, second) -> tuple[str, list[str]]:
    """Returns a sentence and sections that compare the predictions in two folders. Raises UserError, OSError."""
    names = [str(first), str(second)]
    classes = by_class(read(Path(first)), read(Path(second)), names)
    found = {verdict: [file for own in classes.values() for file in own[verdict]] for verdict in range(4)}
    counts = counted(found)
    said = sentence(counts)
    lists = [details(f"{plural(len(found[verdict]), 'image')} that only the {name} classifies rightly",
                     html_table([{"file": file} for file in sorted(found[verdict])[:MOST]]))
             for verdict, name in ((1, "first"), (2, "second"))]
    rows = [{"class": name} | row(counted(own)) for name, own in classes.items()]
    by_gain = sorted(rows, key=lambda one: float(one["gain"]))
    return said, [f"<p>First: {html.escape(names[0])}. Second: {html.escape(names[1])}.</p>",
                  html_table([{"class": "all"} | row(counts), *by_gain]), *lists]


def read(folder: Path) -> dict[str, tuple[str, bool]]:
    """Returns file -> (class, whether it is classified rightly). Raises UserError if predictions.csv is damaged."""
    path = folder / PREDICTIONS
    try:
        with path.open(newline="") as file:
            return {row["file"]: (row["label"], row["label"] == row["predicted"]) for row in csv.DictReader(file)}
    except (KeyError, csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {error!r}; evaluate again") from None


def by_class(first: dict, second: dict, names: list[str]) -> dict[str, dict[int, list[str]]]:
    """Returns class -> place in Counts -> files. Raises UserError if the images or their classes differ."""
    for ours, theirs, name, other in ((first, second, *names), (second, first, *names[::-1])):
        if alone := [file for file in ours if file not in theirs]:
            more = f" and {len(alone) - 1:,} more" if len(alone) > 1 else ""
            raise UserError(f"the evaluations are of other images: {alone[0]}{more} in {name}, but not in {other}; "
                            "evaluate both with the same --data_dir")
    found = defaultdict(lambda: defaultdict(list))
    for file, (label, is_right) in first.items():
        other, is_right_too = second[file]
        if other != label:
            raise UserError(f"{file} is {label} in {names[0]}, and {other} in {names[1]}; evaluate both again")
        found[label][2 * (not is_right) + (not is_right_too)].append(file)
    return found


def counted(files: dict[int, list[str]]) -> Counts:
    """Returns the numbers of files. files: place in Counts -> files."""
    return Counts(*(len(files[place]) for place in range(4)))


def sentence(counts: Counts) -> str:
    """Returns what the comparison says, in words."""
    chance = counts.chance
    certain = (f"the {'second' if counts.second > counts.first else 'first'} is better" if chance < CERTAIN
               else "neither is certainly better")
    return (f"Of {sum(counts):,} images, the second is right where the first is wrong: {counts.second:,}; the reverse: "
            f"{counts.first:,}. If both were equally good, so large a difference would have a probability of "
            f"{chance:.2g} (exact McNemar test), so {certain}.")


def row(counts: Counts) -> dict:
    """Returns a row of the table by class."""
    gain, low, high = counts.gain
    images = sum(counts)
    return {"images": images, "first": f"{(counts.both + counts.first) / images:.1%}",
            "second": f"{(counts.both + counts.second) / images:.1%}", "gain": f"{100 * gain:+.1f}",
            "95% interval, points": f"{100 * low:+.1f} to {100 * high:+.1f}"}
