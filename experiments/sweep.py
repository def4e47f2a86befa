"""Trains every combination of flag values: `python -m experiments.sweep --sweep=FLAG=VALUES [flags of train.py]`.

    --sweep=learning_rate=5,10,20 --sweep=batch_size=512,4096 --seeds=3      18 runs
    --runs=FILE --seeds=3                                                    3 runs for each line of FILE

Each run is a run of train.py, in a folder of its own in --output_dir. The other flags, also --flagfile=RECIPE, are
those of train.py and apply to all runs. After each run, the command writes sweep.json (one row per run), sweep.html
(mean and range over the seeds, and plots) and best.json (which setting is the best, and how many more seeds would tell
if it is too close to call). If it is stopped or killed, the same command continues. More values or seeds add runs.
A run that diverges, or that --stop_below_expected ends, is a result: its top-1 is the accuracy of guessing, but it is
never better than a run that did not. Any other failure ends the sweep.

Commas separate the values. If a value contains a comma or a colon, or the flag takes a list, semicolons separate them:
--sweep='batch_size=512;0:512,30:1024' and --sweep='lr_boundaries=30,60,80;40,80'.

Each line of --runs=FILE has the flags of one run, for flags that belong together. They replace those of the command
line. A line may also name a recipe. # starts a comment.

    --optimizer=lars --learning_rate=5
    --optimizer=sgd --learning_rate=0.1
    --flagfile=recipes/lars_1708.03888/table1-resnet50-256.flags

--search_rate searches the best learning rate of each combination or line: seven rates in factors of two around its
--learning_rate, and further ones until the best one has a worse one on either side. The search uses one seed, and the
dataset of --search_data_dir. Then it trains the best rate with all seeds on --data_dir. If every rate diverges, it
trains no more of that combination, and ends with an error after the others.

--dry_run writes the flags of run N to N.flags in --output_dir. The runs can then be jobs of a Slurm array:
launch/slurm/submit.sh --array=0-17 [options] OUTPUT_DIR/%a.flags. Then the command without --dry_run trains what is
missing and writes the results.
"""
import contextlib
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from common import command
from common.errors import UsageError, UserError
from common.files import as_json
from common.locks import LOCK, Taken, locked
from common.run_folder import top1_of
from data import named
from experiments.planned import Options, Planned, planned, read, settings_of, write_flags
from experiments.trainings import Result, help_of, train_once
from hints.before import on_recipe
from optim.schedules import Piecewise
from reporting.ranking import RATE, labelled
from reporting.sweep import ROWS, judged, shared_advice, time_left, write_sweep

NEAREST, FARTHEST = 3, 12  # factors of two that a search tries above and below its start: at first, at most


class Sweep:
    """The runs of a sweep in its folder, and their results. planned: number of runs, or None in a search."""

    def __init__(self, folder: Path, planned: int | None):
        self._folder = folder
        self._planned = planned
        self._runs: dict[str, Planned] = {}
        self._results: dict[str, Result] = {}
        self._finals: set[str] = set()
        self._seconds: dict[str, float] = {}  # of the runs in the earlier sweep.json
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._seconds = {row["folder"]: row["seconds"] for row in json.loads((folder / ROWS).read_text())}

    def add(self, runs: Sequence[Planned], final: bool = True) -> list[Planned]:
        """Adds runs, reads the results of those that have ended, and returns the others. final: see `train`."""
        for run in runs:
            if final:
                self._finals.add(run.name)
            if run.name not in self._runs and (result := Result.read(self._folder / run.name)):
                self._results[run.name] = replace(
                    result, seconds=max(result.seconds, self._seconds.get(run.name, 0)))
            self._runs[run.name] = run
        self.write()
        return [run for run in runs if run.name not in self._results]

    def train(self, runs: Sequence[Planned], final: bool = True) -> list[Result]:
        """Trains the runs that have not ended. Returns the results of all of them.

        final: whether the runs are compared with each other in best.json. Those of a search are not.
        """
        for run in self.add(runs, final):
            number = [*self._runs].index(run.name) + 1
            of = f" of {self._planned}" if self._planned else ""
            print(f"run {number}{of}: {run.name}{time_left(self.rows, self._planned)}", file=sys.stderr, flush=True)
            try:
                self._results[run.name] = train_once(self._folder / run.name, run.words)
            except UserError as error:
                self.write(str(error))
                raise
            print(f"  {described(self._results[run.name])}", file=sys.stderr, flush=True)
            self.write()
        return [self._results[run.name] for run in runs]

    @property
    def rows(self) -> list[dict]:
        """The rows of sweep.json."""
        return [run.row(self._results[name]) | {"final": name in self._finals}
                for name, run in self._runs.items() if name in self._results]

    def write(self, problem: str = "") -> None:
        """Writes sweep.json, best.json and sweep.html. problem: why the sweep has ended with an error."""
        write_sweep(self._folder, self.rows, self._planned, problem)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Context manager that locks a folder. Waits for another sweep, which may outlive its killed `uv run`."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(folder / LOCK))
        except Taken as holder:
            print(f"waiting for another sweep ({holder}) in {folder} to end", file=sys.stderr, flush=True)
            held.enter_context(locked(folder / LOCK, wait=True))
        yield


def run(argv: Sequence[str]) -> list[dict]:
    """Trains the runs that have no result, unless --dry_run is given. Returns the rows of sweep.json.

    On a terminal, prints the table of results. The last lines on standard error are the judgement and the report.
    Raises UserError, after these lines if a search has found no learning rate.
    """
    options, common, combinations = read(argv)
    plan = functools.partial(planned, options, common)
    settings = [settings_of(common, values)[0] for values in combinations]
    starts = [one.recipe for one in settings]
    seeds = [range(start.seed, start.seed + options.seeds) for start in starts]
    runs = [plan(values, seed) for values, own in zip(combinations, seeds, strict=True) for seed in own]
    centres = [centre(start.learning_rate) for start in starts] if options.search_rate else []
    search_set = {"data_dir": named.absolute(options.search_data_dir)} if options.search_data_dir else {}
    lost = []  # a line for each combination of which no learning rate is left
    folder = Path(options.output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for hint, count in Counter(hint for one in settings for hint in on_recipe(one)).items():
        of = f" ({count} of {len(settings)} combinations)" * (count < len(settings))
        print(f"{hint}{of}", file=sys.stderr, flush=True)
    with alone_in(folder):
        sweep = Sweep(folder, None if options.search_rate else len(runs))
        if options.dry_run:
            missing = sweep.add(runs)
            write_flags(folder, runs)
            print(f"{len(runs)} runs, {len(missing)} to train: {folder}/0.flags to {len(runs) - 1}.flags",
                  file=sys.stderr)
        elif options.search_rate:
            lost = [line for one in zip(combinations, seeds, centres, strict=True)
                    if (line := search(sweep, plan, search_set, *one))]
            sweep.write("; ".join(lost))
        else:
            sweep.train(runs)
    said, lines, _ = judged(sweep.rows)
    command_line = [f"its command: {said['command']}"] if said.get("command") else []
    if lines and command.is_read_by_a_person():
        print(*command.table(lines), sep="\n", flush=True)
    print(said["sentence"], *shared_advice(sweep.rows), *command_line, f"report: {folder}/sweep.html", sep="\n",
          file=sys.stderr)
    if lost:
        raise UserError("; ".join(lost))
    return sweep.rows


def search(sweep: Sweep, plan: Callable[..., Planned], search_set: dict[str, str], values: dict[str, str],
           seeds: range, centre: float) -> str:
    """Searches the learning rate of a combination, and trains the best one with all seeds.

    plan: returns a run, as `planned` does, from values, a seed and a learning rate. search_set: the values that replace
    those of the combination in the search. Returns what is wrong if no rate is left, otherwise an empty string.
    """
    def top1(rates):
        runs = [plan(values | search_set, seeds[0], learning_rate=rate) for rate in rates]
        return [None if one.diverged_at else top1_of(asdict(one)) for one in sweep.train(runs, final=False)]

    rate = best_rate(centre, top1)
    if rate is None:
        others = labelled({name: value for name, value in values.items() if name != RATE})
        return (f"every run{f' with {others}' * bool(others)} diverged, down to learning rate "
                f"{centre / 2**FARTHEST:.3g}; start the search from a lower --learning_rate")
    sweep.train([plan(values, seed, learning_rate=rate) for seed in seeds])
    return ""


def centre(rates: Piecewise) -> float:
    """Returns the learning rate at which a search starts. Raises UsageError if it is not a single one above 0."""
    if len(rates.pairs) > 1 or not rates.values[0]:
        raise UsageError(f"--search_rate: give one --learning_rate above 0 to start from, not {rates}")
    return rates.values[0]


def best_rate(centre: float, top1: Callable[[list[float]], list[float | None]]) -> float | None:
    """Searches the learning rate with the highest accuracy among the centre times powers of two.

    top1: function from rates to their accuracies, which trains what is missing; None for a run that diverged, which is
    worse than any other. Returns None if all diverged.
    """
    lowest, highest = -NEAREST, NEAREST
    while True:
        rates = [centre * 2.0 ** exponent for exponent in range(lowest, highest + 1)]
        accuracies = [-1.0 if accuracy is None else accuracy for accuracy in top1(rates)]
        best = accuracies.index(max(accuracies))
        if 0 < best < len(rates) - 1:
            return rates[best]
        if max(-lowest, highest) == FARTHEST:
            break
        lowest, highest = (lowest - 1, highest) if best == 0 else (lowest, highest + 1)
    if accuracies[best] < 0:
        return None
    print(f"learning rate {rates[best]:.3g} is the {'highest' if best else 'lowest'} that the search tries; a search "
          "from there goes on", file=sys.stderr)
    return rates[best]


def described(result: Result) -> str:
    where = result.diverged_at
    ended = f"top-1 {top1_of(asdict(result)):.2%}"
    if where:
        how = "ended below --expect" if result.below_expected else "diverged"
        ended = f"{how} at step {where['step']} (epoch {where['epoch']:.3f})"
    best = "" if result.best_epoch is None else f", best top-1 {result.best_top1:.2%}"
    return f"{ended}{best}, {result.seconds:.0f} s"


@command.program("experiments.sweep", __doc__, lambda _: help_of(Options), is_alone=True)
def main(argv) -> None:
    """Runs a command line."""
    rows = run(argv)
    if not command.is_read_by_a_person():
        print(as_json(rows), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
