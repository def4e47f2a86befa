"""Which setting is the most accurate, and how sure that is: one judgement for sweeps and comparisons.

Runs that differ only in their seed are one setting. Its top-1 is the mean over its runs. Its 95 % interval is Student's
over the runs; that of a single run is Wilson's over the validation images. Two settings differ if the 95 % interval of
their difference excludes 0. The interval of a difference follows from the two intervals (Zou and Donner,
doi:10.1002/sim.3095; of two proportions, it is Newcombe's).
"""
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plan.run_folder import top1_of
from reporting.charts import number
from reporting.page import duration, filled_columns, grouped, plural
from training.advice import interval

MOST_SEEDS = 100  # of a setting, that a judgement asks for
MOST_NAMED = 4  # settings in a sentence, and flags in front of the results
LONGEST = 60  # characters of the name of a setting
RATE = "learning_rate"
TUNED = (RATE, "weight_decay", "trust_coefficient")  # flags whose best value lies within a grid that is wide enough
NOTE = ("Settings are too close to call if the 95% interval of the difference of their top-1 includes 0. The interval "
        "of a mean is Student's over its runs, that of a single run is Wilson's over the validation images. The number "
        "of seeds assumes that means and spread stay as they are. A run that diverged counts with the accuracy of "
        "guessing, one with --ema_decay with that of the averaged weights.")


@dataclass(frozen=True)
class Setting:
    """The runs that differ only in their seed.

    rows: see `settings`. top1: of the runs that have been evaluated. deviation: the standard deviation over the runs,
    at least half an image, or over the images if there is a single run. interval: the bounds of the 95 % interval.
    """

    name: str
    flags: dict
    rows: Sequence[dict]
    top1: Sequence[float]
    mean: float
    deviation: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, name: str, flags: dict, rows: Sequence[dict]) -> "Setting":
        top1 = [top1_of(row) for row in rows if top1_of(row) is not None]
        mean = statistics.fmean(top1 or [0.0])
        samples = max(row.get("val_samples") or 0 for row in rows) or 10**9  # the accuracy of guessing has no error
        several = len(top1) > 1
        deviation = max(0.5 / samples, statistics.stdev(top1) if several else math.sqrt(mean * (1 - mean) / samples))
        half = half_width(deviation, len(top1)) if several else 0.0
        return cls(name, flags, rows, top1, mean, deviation,
                   (mean - half, mean + half) if several else interval(mean, samples))

    @property
    def scope(self) -> str:
        """The lowest and the highest top-1, or the 95 % interval of a single run, unless it diverged."""
        if len(self.top1) < 2 and not self.rows[0].get("val_samples"):
            return ""
        low, high = (min(self.top1), max(self.top1)) if len(self.top1) > 1 else self.interval
        return f"{low:.2%} to {high:.2%}" + " (95% interval)" * (len(self.top1) < 2)

    def lead_over(self, other: "Setting") -> float:
        """Returns the lower bound of the 95 % interval of the difference to another setting."""
        return self.mean - other.mean - math.hypot(self.mean - self.interval[0], other.interval[1] - other.mean)


def half_width(deviation: float, runs: int) -> float:
    """Returns half of Student's 95 % interval of a mean."""
    from scipy.special import stdtrit

    return float(stdtrit(runs - 1, 0.975)) * deviation / math.sqrt(runs)


def settings(rows: Sequence[dict]) -> list[Setting]:
    """Returns the settings in the order of their flags: numbers by value, then other values as they first occur.

    rows: flags (flag -> value, without the seed), val_top1, ema_val_top1, val_samples unless the run diverged, folder.
    """
    names = names_in(rows)
    occurring = [value for row in rows for value in row["flags"].values()]
    rows = sorted(rows, key=lambda row: [(0, value) if isinstance(value, int | float) else (1, occurring.index(value))
                                         for value in (row["flags"].get(name, -math.inf) for name in names)])
    groups = grouped(rows, lambda row: tuple(row["flags"].items()))
    short = [RATE, *telling([{name: value for name, value in flags if name != RATE} for flags in groups])]
    labels = [labelled({name: value for name, value in flags if name in short}) for flags in groups]
    return [Setting.of(label if 0 < len(label) <= LONGEST else own[0]["folder"], dict(flags), own)
            for label, (flags, own) in zip(labels, groups.items(), strict=True)]


def table(shown: Sequence[Setting], columns: Callable[[dict], dict]) -> list[dict[str, str]]:
    """Returns a line per setting: flags, runs if any has several, top-1 and how sure it is, means of other columns.

    columns: returns those of a row as numbers or texts, "" for what it lacks, None for what is not a number.
    """
    names = names_in(rows := [row for one in shown for row in one.rows])
    lines = []
    for one in shown:
        flags = {name: number(one.flags.get(name, "")) for name in names}
        values = [columns(row) for row in one.rows]
        top1 = {"runs": str(len(values)) * (len(rows) > len(shown)), "top-1": f"{one.mean:.2%}" * bool(one.top1),
                "range": one.scope * bool(one.top1)}
        lines.append(dict([*flags.items()][:MOST_NAMED]) | top1 | {
            title: text_of(title, [own[title] for own in values]) for title in values[0]} | flags)
    return filled_columns(lines)


def text_of(title: str, values: Sequence[float | str | None]) -> str:
    """Returns the mean of a column's values, or the different texts among them."""
    show = "{:.2%}".format if "top-" in title else duration if title == "time" else number
    numbers = [math.nan if value is None else value for value in values if not isinstance(value, str)]
    texts = dict.fromkeys(value for value in values if isinstance(value, str) and value)
    return ", ".join([*([show(statistics.fmean(numbers))] if numbers else []), *texts])


def judgement(judged: Sequence[Setting], grid: Sequence[Setting]) -> dict:
    """Returns the content of best.json.

    `sentence` says it in words. `best` lists the flags of the settings that may be the best, highest mean first.
    `more_seeds` of each would tell them apart: None if none are needed, or too many. `add` has a value of each flag
    whose best value is at the edge of the grid.

    judged: the settings that count. grid: all settings.
    """
    if not judged:
        return unranked("No final run has ended yet." if grid else "No run has ended yet.")
    best = max(judged, key=lambda one: one.mean)
    close = sorted((one for one in judged if best.lead_over(one) <= 0), key=lambda one: -one.mean)
    tied = [one for one in close if math.isclose(one.mean, best.mean)]
    seeds = seeds_to_tell(close)
    add = beyond(best, grid) if len(tied) == 1 else {}
    edges = [f"The highest is at the edge of the grid: add {labelled({name: value})}." for name, value in add.items()]
    more = None if None in seeds else max(seeds, default=None)
    return {"sentence": " ".join([in_words(close, tied, seeds, len(judged)), *edges]),
            "best": [one.flags for one in close], "more_seeds": more, "add": add}


def unranked(sentence: str) -> dict:
    """Returns the content of best.json without a ranking."""
    return {"sentence": sentence, "best": [], "more_seeds": None, "add": {}}


def in_words(close: Sequence[Setting], tied: Sequence[Setting], seeds: Sequence[int | None], of: int) -> str:
    """Returns which setting is the best. close: see `best` of `judgement`. seeds: see seeds_to_tell. of: of all."""
    best = close[0]
    mean = "mean top-1" if any(len(one.rows) > 1 for one in close) else "top-1"
    if len(close) == 1:
        subject = f"The {mean}" if of == 1 else f"The highest {mean}, that of {best.name},"
        return f"{subject} is {best.mean:.2%}, from {best.scope} in {plural(len(best.rows), 'run')}."
    if len(tied) > 1:
        return f"A tie: the {mean} of {listed([one.name for one in tied])} is {best.mean:.2%}. More seeds may tell."
    worse = [one.name for one, more in zip(close[1:], seeds, strict=True) if more]
    told = f"About {plural(max(filter(None, seeds), default=0), 'more seed')} of each would "
    if len(worse) == len(seeds):
        told += "tell"
    elif worse:
        told += f"rule out {listed(worse)}; {MOST_SEEDS} would not tell the others apart"
    else:
        told = f"{MOST_SEEDS} seeds would not tell"
    return f"Too close to call: the {mean} is {listed([f'{one.mean:.2%} with {one.name}' for one in close])}. {told}."


def listed(names: Sequence[str]) -> str:
    """Returns names as words, only some of many."""
    if len(names) > MOST_NAMED:
        names = [*names[:MOST_NAMED - 1], f"{len(names) - MOST_NAMED + 1} others"]
    comma = "; " if any("," in name for name in names) else ", "
    return f"{comma.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def seeds_to_tell(close: Sequence[Setting]) -> list[int | None]:
    """Returns how many more seeds tell the first from each other, if means and deviations stay. None: too many."""
    best, *others = close

    def needed(one):
        runs = len(best.rows), len(one.rows)
        spread = math.hypot(best.deviation, one.deviation)
        return next((seeds - min(runs) for seeds in range(max(runs) + 1, MOST_SEEDS + 1)
                     if best.mean - one.mean > half_width(spread, seeds)), None)

    return [needed(one) for one in others]


def beyond(best: Setting, grid: Sequence[Setting]) -> dict[str, float]:
    """Returns the next value, at most ten times, of each flag in TUNED whose best value is the grid's first or last."""
    found = {}
    for name in TUNED:
        values = sorted({one.flags[name] for one in grid if one.flags | {name: None} == best.flags | {name: None}
                         and isinstance(one.flags.get(name), int | float)})
        for edge, inner in (values[:2], values[:-3:-1]) if len(values) > 1 else ():
            if best.flags.get(name) == edge > 0:
                found[name] = float(f"{edge * min(max(edge / inner, 0.1), 10) if inner else 2 * edge:.2g}")
    return found


def labelled(flags: dict) -> str:
    """Returns flags in words."""
    return ", ".join(f"{name.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}"
                     for name, value in flags.items())


def names_in(rows: Sequence[dict]) -> list[str]:
    """Returns the flags of all rows, in the order of their first occurrence."""
    return list(dict.fromkeys(name for row in rows for name in row["flags"]))


def telling(combinations: Sequence[dict], kept: str | None = None) -> list[str]:
    """Returns the fewest flags, and `kept`, that tell the combinations apart. The other flags follow from them."""
    names = list(dict.fromkeys(name for flags in combinations for name in flags))

    def distinct(names):
        return len({tuple(flags.get(name) for name in names) for flags in combinations})

    for name in reversed(names):
        fewer = [other for other in names if other != name]
        if name != kept and distinct(fewer) == distinct(names):
            names = fewer
    return names
