"""Progress on standard error: two lines that are redrawn on a terminal, and one line per evaluation.

The first step or evaluation ends the display of the start-up's stages.
"""
import math
import re
import sys
import textwrap
import time

from common import metric
from common.accuracy import against_guessing, interval
from common.activity import WAITS, on_terminal, startup
from common.errors import complain, in_list
from common.run_folder import CHECKPOINTS, top1_of
from common.screen import REDRAWN_EVERY, Screen, clock_time, fitting
from reporting.sentences import STORAGE_LIMITS, in_words, rounded
from training.observer import Evaluation, Observer, RunInfo, Update

KEPT = 0.95  # decay of the moving averages, per step
COLUMNS = 80  # longest line of an evaluation, and of the result on a terminal
SPEED_AFTER = 10.0  # seconds after the first step; then one line has the speed if there is no terminal


class Average:
    """An exponential moving average of weighted values: `add` takes value * weight."""

    def __init__(self, kept: float = KEPT):
        self._kept = kept
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self._sum = self._kept * self._sum + value
        self._weight = self._kept * self._weight + weight

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


class Pace:
    """Measures the images per second, and forecasts the time left.

    The forecast also includes evaluations and other time between two steps, in proportion to the samples.
    """

    def __init__(self):
        self._speed = Average()
        self._samples = 0
        self._between = 0.0  # seconds
        self._last = None  # time of the last step or evaluation
        self._is_between = False

    def step(self, images: int) -> None:
        """Adds a step, which ends now."""
        now = time.perf_counter()
        if self._is_between:
            self._between += max(0.0, now - self._last - (images / self._speed.value if self._speed.value else 0))
        elif self._last is not None:
            self._speed.add(images, now - self._last)
        self._samples += images
        self._last = now
        self._is_between = False

    def pause(self) -> None:
        """Adds an evaluation, which ends now."""
        now = time.perf_counter()
        if self._last is not None:
            self._between += now - self._last
            self._last = now
            self._is_between = True

    @property
    def images_per_second(self) -> float | None:
        return self._speed.value

    def seconds(self, samples: int) -> float | None:
        """Forecasts the seconds for so many samples. None before the second step."""
        speed = self._speed.value
        return samples * (1 / speed + self._between / self._samples) if speed else None


class ProgressDisplay(Observer):
    """Shows the progress of a training on standard error."""

    def start(self, run: RunInfo) -> None:
        self._run = run
        self._screen = None
        self._drawn = -math.inf  # time
        self._began = None  # time of the first step
        self._has_speed = self._has_heads = False
        self.rewind(run.progress)

    def rewind(self, progress) -> None:
        self._samples = progress.samples
        self._pace = Pace()
        self._averages = {name: Average() for name in ("loss", "top1", "data")}
        self._best = progress.best and progress.best["top1"]

    def step(self, update: Update) -> None:
        startup.end()
        self._samples += update.batch_size
        self._pace.step(update.batch_size)
        for name, value in {"loss": update.loss, "top1": update.top1, **update.waits}.items():
            if name in self._averages:
                self._averages[name].add(value)
        now = time.perf_counter()
        if not on_terminal():
            self._print_speed_once(now)
        elif now - self._drawn >= REDRAWN_EVERY:
            self._screen = self._screen or Screen("run", "epoch")
            self._screen.draw(self._run_line(update), self._epoch_line(update))
            self._drawn = now

    def _print_speed_once(self, now) -> None:
        """Prints the speed and the time left if the first evaluation is late."""
        self._began = self._began or now
        if not self._has_speed and now - self._began > SPEED_AFTER and self._left:
            self._has_speed = True
            print(f"{self._pace.images_per_second:,.1f} images/s; {self._left} left", file=sys.stderr, flush=True)

    @property
    def _total(self) -> int:
        return sum(phase["steps"] * phase["global_batch_size"] for phase in self._run.plan["phases"])

    @property
    def seconds_left(self) -> float | None:
        """Forecasts the duration of the rest. None before the second step."""
        return self._pace.seconds(max(0, self._total - self._samples))

    @property
    def _left(self) -> str:
        seconds = self.seconds_left
        return "" if seconds is None else clock_time(seconds)

    def _run_line(self, update):
        epochs = math.ceil(self._run.plan["epochs"])
        left = self._left
        figures = [f"epoch {min(int(update.epoch) + 1, epochs)}/{epochs}", left and f"{left} left",
                   "" if self._best is None else f"best top-1 {self._best:.2%}", f"lr {update.learning_rate:.4g}"]
        return self._samples / self._total, figures

    def _epoch_line(self, update):
        speed = self._pace.images_per_second
        data = self._averages["data"].value
        figures = ["" if speed is None else f"{speed:,.0f} images/s", f"loss {self._averages['loss'].value:.4f}",
                   f"top-1 {self._averages['top1'].value:.1%}", "" if data is None else f"data {data:.0%}",
                   f"batch {update.batch_size:,}"]
        done = update.epoch % 1 + update.batch_size / self._run.dataset.train.samples
        return min(1.0, done), figures

    def evaluation(self, evaluation: Evaluation) -> None:
        startup.end()
        self._pace.pause()
        self._has_speed = True
        row = evaluation.row
        self._best = max(self._best or 0.0, top1_of(row))
        line = self._line(row, evaluation.breakdown, evaluation.expected)
        if on_terminal() and not self._has_heads:
            print(heads(line), file=sys.stderr)
            self._has_heads = True
        print(line, file=sys.stderr, flush=True)
        for sentence in evaluation.slow:
            complain(f"warning: {sentence}")

    def _line(self, row, breakdown, expected) -> str:
        waits = [f"{name} {breakdown[name]:.0%}" for name in WAITS if breakdown]
        if breakdown.get("storage", 0.0) > STORAGE_LIMITS:
            waits.insert(0, f"storage {breakdown['storage']:.0%}")
        variants = [f"{prefix.rstrip('_').replace('_', ' ')} {row[prefix + metric.VAL_TOP1]:.2%}"
                    for prefix in metric.VARIANTS if prefix + metric.VAL_TOP1 in row]
        lead = "" if expected is None else f" ({100 * (top1_of(row) - expected):+.2f})"
        left = f"  left {self._left}" if self._left and self._samples < self._total else ""
        figures = [f"epoch {row['epoch']:g}/{self._run.plan['epochs']:g}",
                   f"train {row[metric.TRAIN_LOSS]:.4f} {row[metric.TRAIN_TOP1]:.2%}",
                   f"val {row[metric.VAL_LOSS]:.4f} {row[metric.VAL_TOP1]:.2%}{lead}", *variants,
                   f"{row[metric.IMAGES_PER_SECOND]:,.0f} images/s", *waits]
        return fitting(figures, COLUMNS - len(left)) + left

    def end(self, summary: dict) -> None:
        self.close()
        print_result(result_lines(summary, len(self._run.dataset.classes)))
        print(*(f"advice: {sentence}\n" for sentence in summary["advice"]), sep="", end="", file=sys.stderr)

    def close(self) -> None:
        if self._screen:
            self._screen.close()
            self._screen = None


def heads(line: str) -> str:
    """Returns heads for the numbers after "train" and "val" in the line of an evaluation."""
    return re.sub(r"(?:(?<=train )|(?<=val ))(\S+) (\S+)|\S", lambda found: (
        f"{'loss':{len(found[1])}} {'top-1':{len(found[2])}}" if found[1] else " "), line).rstrip()


def print_result(lines: list[str]) -> None:
    """Prints `result_lines` on standard error, on a terminal with the top-1 in bold and in lines of COLUMNS."""
    if on_terminal():
        text = "\n".join(textwrap.fill(line, COLUMNS, subsequent_indent="  ") for line in lines)
        print(re.sub("top-1 [0-9.]+%", "\033[1m\\g<0>\033[0m", text, count=1), file=sys.stderr)
    else:
        print(*lines, sep="\n", file=sys.stderr)


def result_lines(summary: dict, classes: int, images: str = "validation") -> list[str]:
    """Returns the result of a training or an evaluation. summary: of summary.json. classes: their number.

    images: which were evaluated, in a word. The best evaluation comes before the last, unless it is that.
    """
    best = best_lines(summary)
    prefix = metric.BEST if metric.BEST + metric.WEAKEST_CLASSES in summary else ""
    weakest = ", ".join(f"{in_list(one['class'])}: {one['recall']:.1%} ({one['correct']} of {one['images']})"
                        for one in summary[prefix + metric.WEAKEST_CLASSES])
    judged = " by the average of the weights" if metric.EMA_VAL_TOP1 in summary else ""
    balanced, samples = (summary[prefix + name] for name in (metric.BALANCED_TOP1, metric.BALANCED_SAMPLES))
    line = (f"weakest classes{' of the best' if best and prefix else ''}{judged}: {weakest}; balanced top-1, the mean "
            f"over the classes, {rounded(balanced, interval(balanced, samples))}")
    return [*best, f"{'last ' if best else ''}{images}: {validation_line(summary, classes)}", *views_lines(summary),
            *([line] if weakest else [])]


def best_lines(summary: dict) -> list[str]:
    """Returns the best evaluation, unless the last has its top-1, or there was none in training."""
    top1, samples = summary.get("best_top1"), summary[metric.VAL_SAMPLES]
    if top1 in (None, summary[metric.VAL_TOP1]):
        return []
    judged = " by the average of the weights" if metric.EMA_VAL_TOP1 in summary else ""
    kept = f", kept in {CHECKPOINTS}/best" if summary["best_checkpoint"] else ""
    return [f"best validation{judged}, at epoch {summary['best_epoch']:g} of {summary['epochs']:g}: top-1 {top1:.2%} "
            f"({round(top1 * samples)} of {samples}, {in_words(top1, samples)}){kept}"]


def views_lines(summary: dict) -> list[str]:
    """Returns the result of the mean over --evaluation_views, also by the average of the weights, if there is one."""
    samples = summary[metric.VAL_SAMPLES]
    return [f"{words}: top-1 {summary[prefix + metric.VAL_TOP1]:.2%} "
            f"({summary[prefix + metric.VAL_TOP1_COUNT]} of {samples}), loss {summary[prefix + metric.VAL_LOSS]:.4f}"
            for prefix, (words, _) in metric.VARIANTS.items()
            if metric.VIEWS in prefix and prefix + metric.VAL_TOP1 in summary]


def validation_line(summary: dict, classes: int) -> str:
    top1, samples, guess = summary[metric.VAL_TOP1], summary[metric.VAL_SAMPLES], summary[metric.VAL_GUESS_COUNT]
    verdict = against_guessing(top1, samples, guess / samples)
    verdict = f"; {verdict}, which is right on {guess / samples:.2%}" if verdict else ""
    top5 = (f"top-5 {summary[metric.VAL_TOP5]:.2%} ({summary[metric.VAL_TOP5_COUNT]}), "
            if classes >= metric.TOP5_CLASSES else "")
    right = f"the first guess is right for {summary[metric.VAL_TOP1_COUNT]} of {samples}"
    return (f"top-1 {top1:.2%} ({right}, {in_words(top1, samples)}), {top5}"
            f"loss {summary[metric.VAL_LOSS]:.4f}; {summary['seconds']:.0f} s{verdict}")
