"""Finds the most accurate setting of a sweep or a comparison, and says how certain that is.

Runs that differ only in their seed are one setting. Its top-1 is the mean over its runs, with a 95 % interval:

    one run         Wilson's interval of a proportion, over the validation images
    several runs    Student's interval of the mean, over the runs, combined with Wilson's: the distance of each bound
                    from the mean is sqrt(student ** 2 + wilson ** 2), because the two variances add up

Two settings differ if the 95 % interval of the difference of their means excludes 0. That interval is computed from the
two intervals (Zou and Donner, doi:10.1002/sim.3095); of two single runs, it is Newcombe's.
"""
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np

from common import metric
from common.accuracy import interval, is_guessing
from common.errors import plural
from common.run_folder import top1_of
from reporting import charts
from reporting.charts import number
from reporting.page import duration, filled_columns, grouped
from reporting.sentences import rounded

MOST_SEEDS = 100  # of a setting; if more were needed, the sentence says that they may not suffice
UNKNOWN_SPREAD = "A single run does not show the spread over seeds: more seeds are needed."
POWER = 0.8  # probability with which the added seeds show a difference
QUANTILES = np.linspace(0.01, 0.99, 50)  # of the unknown standard deviation over seeds, for the mean power
MOST_NAMED = 4  # settings in a sentence, and flags in front of the results
MOST_DRAWN = 20  # settings in the plot of differences
LONGEST = 60  # characters of the name of a setting
LEAD = "lead, points"
RATE = "learning_rate"
TUNED = (RATE, "weight_decay", "trust_coefficient")  # flags whose best value lies within a grid that is wide enough
NOTE = ("Runs are ranked by the top-1 of their last evaluation, not of their best. Settings are too close to call "
        "if the 95% interval of the difference of their top-1 includes 0. The interval of a mean adds the variance "
        "over its runs, as Student's, and that of the validation images, as Wilson's. A single run has the second "
        "alone, so it is not called better or worse than others. The number of seeds tells with a probability of "
        f"{POWER:.0%}, given the runs so far. A run that diverged counts with the accuracy of guessing, and ranks "
        "after all that did not; one with --ema_decay counts with that of the averaged weights.")
VALIDATION = {"classes": "the number of classes", "samples": "the number of images", "class_names": "class names",
              "images": "images", "files": "files", "sizes": "sizes of files"}  # keys of run_data.validation_set


@dataclass(frozen=True)
class Setting:
    """The runs that differ only in their seed."""

    name: str
    flags: dict
    rows: Sequence[dict]  # see `settings`
    top1: Sequence[float]  # of the runs that have been evaluated
    mean: float  # of top1
    deviation: float  # standard deviation of top1, at least that of half an image
    samples: int  # number of validation images

    @classmethod
    def of(cls, name: str, flags: dict, rows: Sequence[dict]) -> "Setting":
        top1 = [top1_of(row) for row in rows if top1_of(row) is not None]
        mean = statistics.fmean(top1 or [0.0])
        samples = max(row.get(metric.VAL_SAMPLES) or 0 for row in rows) or 10**9  # of guessing, which has no error
        deviation = max(0.5 / samples, statistics.stdev(top1) if len(top1) > 1 else 0.0)
        return cls(name, flags, rows, top1, mean, deviation, samples)

    @cached_property
    def images(self) -> tuple[float, float]:
        """The bounds of the 95 % interval over the validation images alone."""
        return interval(self.mean, self.samples)

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The bounds of the 95 % interval over seeds and images."""
        low, high = self.images
        half = half_width(self.deviation, len(self.top1)) if len(self.top1) > 1 else 0.0
        return self.mean - math.hypot(half, self.mean - low), self.mean + math.hypot(half, high - self.mean)

    @property
    def has_diverged(self) -> bool:
        """Whether all of its runs diverged."""
        return all(row.get("diverged") for row in self.rows)

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts settings from worse to better: by their means, after those of which all runs diverged."""
        return not self.has_diverged, self.mean

    @property
    def is_single(self) -> bool:
        """Whether the spread over seeds is unknown, because there is one run, which did not diverge."""
        return len(self.top1) < 2 and not self.has_diverged

    def scope(self, show: Callable[[float], str] = "{:.2%}".format) -> str:
        """Returns the range of top-1: lowest to highest, or the 95 % interval of a single run unless it diverged."""
        if len(self.top1) < 2 and not self.rows[0].get(metric.VAL_SAMPLES):
            return ""
        low, high = (min(self.top1), max(self.top1)) if len(self.top1) > 1 else self.interval
        return f"{show(low)} to {show(high)}" + " (95% interval)" * (len(self.top1) < 2)

    def percent(self, top1: float | None = None) -> str:
        """Returns an accuracy, by default the mean, with as many decimals as the interval leaves a meaning."""
        return rounded(self.mean if top1 is None else top1, self.interval)

    def lead(self, other: "Setting", seeds_too: bool = True) -> tuple[float, float, float]:
        """Returns the difference to the mean of another setting, and the bounds of its 95 % interval.

        seeds_too: whether the interval is over seeds and images, or over the images alone.
        """
        ours, theirs = (one.interval if seeds_too else one.images for one in (self, other))
        lead = self.mean - other.mean
        return (lead, lead - math.hypot(self.mean - ours[0], theirs[1] - other.mean),
                lead + math.hypot(ours[1] - self.mean, other.mean - theirs[0]))

    def lead_over(self, other: "Setting", seeds_too: bool = True) -> float:
        """Returns the lower bound of the interval of `lead`."""
        return self.lead(other, seeds_too)[1]


def half_width(deviation, runs):
    """Returns half the width of Student's 95 % interval of a mean.

    deviation: standard deviation over the runs. runs: their number. Both may be arrays.
    """
    from scipy.special import stdtrit

    return stdtrit(runs - 1, 0.975) * deviation / np.sqrt(runs)


def settings(rows: Sequence[dict], by_folder: bool = False) -> list[Setting]:
    """Returns the settings, sorted by the values of their flags: numbers first, other values as they first occur.

    by_folder: whether the folder names a single run, in place of the few flags that tell it from the others.
    rows: one per run, with `flags` (flag -> value, without the seed), `diverged`, `val_top1`, `ema_val_top1`, `folder`,
    `validation` (see run_data.validation_set), and unless the run diverged `val_samples` and `val_guess_count`.
    """
    names = names_in(rows)
    occurring = [value for row in rows for value in row["flags"].values()]
    rows = sorted(rows, key=lambda row: [(0, value) if isinstance(value, int | float) else (1, occurring.index(value))
                                         for value in (row["flags"].get(name, -math.inf) for name in names)])
    groups = grouped(rows, lambda row: tuple(row["flags"].items()))
    short = [RATE, *telling([{name: value for name, value in flags if name != RATE} for flags in groups])]
    labels = [labelled({name: value for name, value in flags if name in short}) for flags in groups]
    return [Setting.of(own[0]["folder"] if not 0 < len(label) <= LONGEST or (by_folder and len(own) == 1) else label,
                       dict(flags), own) for label, (flags, own) in zip(labels, groups.items(), strict=True)]


def table(shown: Sequence[Setting], columns: Callable[[dict], dict], ranked: Sequence[Setting] = ()) -> list[dict]:
    """Returns a line per setting: its flags, number of runs, top-1 with range and lead, the means of other columns.

    columns: function from a row to these other columns: title -> number or text, "" if missing, None for NaN. ranked:
    what `by_mean` returns. The first leads the second, and the others have its lead over them below zero.
    """
    leads = {str(one.flags): in_points(one, ranked[one is ranked[0]]) for one in ranked} if len(ranked) > 1 else {}
    names = names_in(rows := [row for one in shown for row in one.rows])
    lines = []
    for one in shown:
        flags = {name: number(one.flags.get(name, "")) for name in names}
        values = [columns(row) for row in one.rows]
        top1 = {"runs": str(len(values)) * (len(rows) > len(shown)), "top-1": one.percent() * bool(one.top1),
                "range": one.scope(one.percent) * bool(one.top1), LEAD: leads.get(str(one.flags), "")}
        lines.append(dict([*flags.items()][:MOST_NAMED]) | top1 | {
            title: text_of(title, [own[title] for own in values], one.percent) for title in values[0]} | flags)
    return filled_columns(lines)


def by_mean(judged: Sequence[Setting], said: dict) -> list[Setting]:
    """Returns the settings, highest mean first, or none if they are not ranked. said: their judgement."""
    return sorted(judged, key=attrgetter("rank"), reverse=True) if said["best"] else []


def by_lead(shown: Sequence[Setting], said: dict) -> list[Setting]:
    """Returns settings in the order of a table: highest mean first, or as they are if they are not ranked.

    said: their judgement.
    """
    return sorted(shown, key=attrgetter("rank"), reverse=True) if said["best"] else [*shown]


def best_of(shown: Sequence[Setting], said: dict) -> int | None:
    """Returns the index of the best setting, or None if they are too close to call, or not ranked.

    said: their judgement.
    """
    return next((index for index, one in enumerate(shown) if [one.flags] == said["best"]), None)


def in_points(one: Setting, other: Setting, words: str = "") -> str:
    """Returns the lead of a setting over another and its interval, in percentage points.

    words: between the two, in a sentence.
    """
    lead, *bounds = one.lead(other)
    lead, low, high = (rounded(value, bounds)[:-1] for value in (lead, *bounds))
    return f"{lead}{words} ({'95% interval ' * bool(words)}{low} to {high})"


def reported(rows: Sequence[dict]) -> float | None:
    """Returns the top-1 that the source of the runs' recipe reports, or None if they have several, or none."""
    found = {(re.findall(r"top-1 ([\d.]+) ?%", row.get("reported") or "") or [None])[0] for row in rows}
    return float(*found) / 100 if len(found) == 1 and None not in found else None


def differences(ranked: Sequence[Setting]) -> str:
    """Returns a forest plot of how far settings lie below the highest mean. ranked: what `by_mean` returns."""
    if len(ranked) < 2:
        return ""
    first, *others = ranked[:MOST_DRAWN]
    rows = [(one.name, *(100 * value for value in one.lead(first)), in_points(one, first)) for one in others]
    figure = reported([row for one in ranked for row in one.rows])
    marks = [(first.name, 0.0)]
    if figure is not None:
        marks.append((f"reported, {100 * (figure - first.mean):+.1f}", 100 * (figure - first.mean)))
    return charts.forest("Top-1 minus that of the highest, in points, with 95% intervals", rows, marks)


def text_of(title: str, values: Sequence[float | str | None], percent: Callable[[float], str]) -> str:
    """Returns the mean of a column's values, or the different texts among them. percent: shows an accuracy."""
    show = percent if "top-" in title else duration if title == "time" else number
    numbers = [math.nan if value is None else value for value in values if not isinstance(value, str)]
    texts = dict.fromkeys(value for value in values if isinstance(value, str) and value)
    return ", ".join([*([show(statistics.fmean(numbers))] if numbers else []), *texts])


def judgement(judged: Sequence[Setting], grid: Sequence[Setting]) -> dict:
    """Returns the content of best.json.

        sentence    the result in words
        best        flags of each setting that may be the best, highest mean first; empty if settings are not ranked
        more_seeds  number of seeds to add to each of these to show which is better; None if one is the best, if more
                    than MOST_SEEDS are needed, or if a setting has a single run
        add         flag -> a further value to try, where the best value is the lowest or highest of those tried

    judged: the settings that may be the best. grid: all settings, also those of a search, for `add`.
    """
    if reason := not_ranked(judged, grid):
        return unranked(reason)
    best, *others = ranked = sorted(judged, key=attrgetter("rank"), reverse=True)
    close = [one for one in ranked if best.lead_over(one) <= 0 and not one.has_diverged]
    tied = [one for one in close if math.isclose(one.mean, best.mean)]
    has_single = len(judged) > 1 and any(one.is_single for one in judged)
    seeds = [None if has_single else seeds_to_tell(best, one) for one in close[1:]]
    add = beyond(best, grid) if len(tied) == 1 else {}
    edges = [f"The highest is at the edge of the grid: add {labelled({name: value})}." for name, value in add.items()]
    more = None if None in seeds else max(seeds, default=None)
    hint = UNKNOWN_SPREAD if has_single else on_seeds(close, more) if len(close) > 1 else ""
    return {"sentence": " ".join([in_words(close, tied, others, hint), *edges]),
            "best": [one.flags for one in close], "more_seeds": more, "add": add}


def unranked(sentence: str) -> dict:
    """Returns the content of best.json without a ranking."""
    return {"sentence": sentence, "best": [], "more_seeds": None, "add": {}}


def not_ranked(judged: Sequence[Setting], grid: Sequence[Setting]) -> str:
    """Returns why settings are not ranked, as a sentence, or an empty string."""
    if (ended := judged or grid) and all(one.has_diverged for one in ended):
        return "Every run that has ended diverged."
    if not judged:
        return "No final run has ended yet." if grid else "No run has ended yet."
    rows = [row for one in judged for row in one.rows]
    if differing := different_sets(rows):
        return f"The runs are not ranked, because their validation sets differ in {listed(differing)}."
    best = max(judged, key=attrgetter("rank"))
    guess = max(guess_of(row) for row in rows)
    if guess and is_guessing(best.mean, best.samples, guess):
        return (f"The highest top-1, {best.percent()}, is at the level of guessing, which is right on "
                f"{best.percent(guess)}.")
    return ""


def different_sets(rows: Sequence[dict]) -> list[str]:
    """Returns what differs between the validation sets of runs, in words. What a run does not record is equal."""
    known = [row.get("validation") or {} for row in rows]
    return [words for key, words in VALIDATION.items() if len({one[key] for one in known if key in one}) > 1]


def guess_of(row: dict) -> float:
    """Returns the top-1 of always naming the most frequent class, or 0 if it is not known."""
    if row.get("diverged"):
        return top1_of(row) or 0.0
    return (row.get(metric.VAL_GUESS_COUNT) or 0) / (row.get(metric.VAL_SAMPLES) or 1)


def in_words(close: Sequence[Setting], tied: Sequence[Setting], others: Sequence[Setting], hint: str) -> str:
    """Returns the sentence on the best setting.

    close: the settings that may be the best, highest mean first. tied: those of them with the highest mean. others: all
    settings but the best, highest mean first. hint: sentence on further seeds.
    """
    best = close[0]
    mean = "mean top-1" if any(len(one.rows) > 1 for one in close) else "top-1"
    if len(tied) > 1:
        return f"A tie: the {mean} of {listed([one.name for one in tied])} is {best.percent()}. More seeds may tell."
    if len(close) > 1:
        each = listed([f"{best.percent(one.mean)} with {one.name}" for one in close])
        lead = in_points(best, close[1], " points")
        return f"Too close to call: the {mean} is {each}. The lead of {best.name} is {lead}. {hint}"
    subject = f"The highest {mean}, that of {best.name}," if others else f"The {mean}"
    scope = f", from {bounds}" if (bounds := best.scope(best.percent)) else ""
    lead = f" It leads {others[0].name} by {in_points(best, others[0], ' points')}." if others else ""
    return f"{subject} is {best.percent()}{scope} in {plural(len(best.rows), 'run')}.{lead} {hint}".rstrip()


def on_seeds(close: Sequence[Setting], more: int | None) -> str:
    """Returns a sentence on how many seeds to add to each. more: their number, or None if there are too many."""
    if more:
        return f"About {plural(more, 'more seed')} of each would tell with a probability of {POWER:.0%}."
    too_few = any(close[0].lead_over(one, seeds_too=False) <= 0 for one in close[1:])
    return f"Even {MOST_SEEDS} seeds of each may not tell{'; more validation images may' * too_few}."


def listed(names: Sequence[str]) -> str:
    """Joins names with commas and \"and\". After MOST_NAMED - 1 of many, the number of the others follows."""
    if len(names) > MOST_NAMED:
        names = [*names[:MOST_NAMED - 1], f"{len(names) - MOST_NAMED + 1} others"]
    comma = "; " if any("," in name for name in names) else ", "
    return f"{comma.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def seeds_to_tell(best: Setting, other: Setting) -> int | None:
    """Returns how many seeds to add to each of two settings to show a difference with a probability of POWER, or None.

    The probability is predicted from the runs so far. Their variance over seeds follows a scaled inverse chi-squared
    distribution. Given a variance v, the mean over N seeds, of which n have run, is normal around the mean over these n
    with a variance of v * (1/n - 1/N).
    """
    from scipy.special import chdtri, ndtr

    runs = len(best.top1), len(other.top1)
    seeds = np.arange(max(runs) + 1, MOST_SEEDS + 1)[:, None]
    freedom = sum(runs) - 2
    scale = np.sqrt(freedom / chdtri(freedom, QUANTILES))
    images = best.mean - other.mean - best.lead_over(other, seeds_too=False)
    needed = np.hypot(half_width(scale * math.hypot(best.deviation, other.deviation), seeds), images)
    moves = scale * np.sqrt(sum(one.deviation**2 * (1 / number - 1 / seeds)
                                for one, number in zip((best, other), runs, strict=True)))
    power = sum(ndtr((lead - needed) / moves).mean(axis=1) for lead in (best.mean - other.mean, other.mean - best.mean))
    return next((int(number) - min(runs) for [number], chance in zip(seeds, power, strict=True) if chance >= POWER),
                None)


def beyond(best: Setting, grid: Sequence[Setting]) -> dict[str, float]:
    """Returns flag -> next value, for each flag of TUNED whose best value is the lowest or highest of the grid.

    It continues the grid geometrically, by a factor of at most ten.
    """
    found = {}
    for name in TUNED:
        values = sorted({one.flags[name] for one in grid if one.flags | {name: None} == best.flags | {name: None}
                         and isinstance(one.flags.get(name), int | float)})
        for edge, inner in (values[:2], values[:-3:-1]) if len(values) > 1 else ():
            if best.flags.get(name) == edge > 0:
                found[name] = float(f"{edge * min(max(edge / inner, 0.1), 10) if inner else 2 * edge:.2g}")
    return found


def labelled(flags: dict) -> str:
    """Returns flags in words: learning rate 0.1, optimizer lars."""
    return ", ".join(f"{name.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}"
                     for name, value in flags.items())


def names_in(rows: Sequence[dict]) -> list[str]:
    """Returns the flags of all rows, in the order of their first occurrence."""
    return list(dict.fromkeys(name for row in rows for name in row["flags"]))


def telling(combinations: Sequence[dict], kept: str | None = None) -> list[str]:
    """Returns flags, as few as possible, whose values differ between any two combinations. kept: one that stays."""
    names = list(dict.fromkeys(name for flags in combinations for name in flags))

    def distinct(names):
        return len({tuple(flags.get(name) for name in names) for flags in combinations})

    for name in reversed(names):
        fewer = [other for other in names if other != name]
        if name != kept and distinct(fewer) == distinct(names):
            names = fewer
    return names
