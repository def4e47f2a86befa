"""Trains every combination of flag values: `python -m experiments.sweep --sweep=FLAG=VALUES [flags of train.py]`.

    --sweep=learning_rate=5,10,20 --sweep=batch_size=512,4096 --seeds=3      18 runs

Each run is a run of train.py, in a folder of its own in --output_dir. The other flags, also --flagfile=RECIPE, are
those of train.py and apply to all runs. After each run, the command writes sweep.json (one row per run) and sweep.html
(mean and spread over the seeds). If it is stopped or killed, the same command continues. More values or seeds add runs.
A run that diverges is a result: its top-1 is the accuracy of guessing. Any other failure ends the sweep.

Commas separate the values. If a value contains a comma or a colon, or the flag takes a list, semicolons separate them:
--sweep='batch_size=512;0:512,30:1024' and --sweep='lr_boundaries=30,60,80;40,80'.

--dry_run writes the flags of run N to N.flags in --output_dir. The runs can then be jobs of a Slurm array:
launch/slurm/submit.sh --array=0-17 [options] OUTPUT_DIR/%a.flags. Then the command without --dry_run trains what is
missing and writes the results.
"""
import contextlib
import functools
import hashlib
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from common import command, flags
from common.errors import UsageError, UserError
from common.files import as_json, locked, write_atomically
from common.flags import flag
from common.recipe_file import flags_in
from data import named
from experiments.cached_run import Result, train_once
from optim.schedules import same
from reporting.observer import top1_of
from reporting.run_folder import FLAGS
from reporting.sweep import write_sweep
from training import flags as train_flags
from training.plan import plan_for

GROUPS = train_flags.GROUPS
SWEPT = (*(name for name in (*flags.names(GROUPS["Recipe"]), *flags.names(GROUPS["Launch"])) if name != "seed"),
         "init_checkpoint", "on_divergence", "max_rollbacks")
LISTS = {one.name for group in GROUPS.values() for one in fields(group) if isinstance(one.metadata.get("given"), list)}
LONGEST = 150  # characters in the name of a run's folder


def swept(texts: list[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Parses the values of --sweep to (flag, values) pairs. Raises ValueError."""
    pairs = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name == "seed":
            raise ValueError("give --seeds=NUMBER instead of seed; --seed is the first")
        if name not in SWEPT:
            raise ValueError(f"'{text}' is not FLAG=VALUES with a flag of train.py, such as learning_rate=5,10,20"
                             + flags.nearest_value(f"--sweep={name}: value should be one of <{'|'.join(SWEPT)}>"))
        if name in pairs:
            raise ValueError(f"{name} is given twice; give all of its values at once")
        separator = ";" if {";", ":"} & {*values} or name in LISTS else ","
        pairs[name] = tuple(dict.fromkeys(value.strip() for value in values.split(separator)))
        if not all(pairs[name]):
            raise ValueError(f"'{text}' has an empty value")
    return tuple(pairs.items())


@dataclass(frozen=True)
class Options:
    """This command's own flags.

    sweep: Flag of train.py and its values, such as learning_rate=5,10,20. Can be given several times. Every combination
        is trained.
    seeds: Number of seeds for each combination. They count up from --seed.
    output_dir: Folder for the runs, sweep.json and sweep.html.
    dry_run: Check the flags, and write those of each run to a file and the results so far, but train nothing.
    """

    sweep: tuple[tuple[str, tuple[str, ...]], ...] = flag([], parse=swept, repeated=True)
    seeds: int = flag(1, low=1, high=10_000)
    output_dir: str = "runs/sweep"
    dry_run: bool = False


@dataclass(frozen=True)
class Planned:
    """A run of the sweep. values: text of each swept flag. words: its flags, without --output_dir."""

    values: dict[str, str]
    seed: int
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """The folder's name. What is long, or unusual in a file's name, is replaced, and a hash keeps it distinct."""
        text = ",".join(f"{name}={value}" for name, value in (*self.values.items(), ("seed", self.seed)))
        plain = re.sub(r"[^\w.:+=,-]", "_", text)[:LONGEST]
        return plain if plain == text else f"{plain},{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def row(self, result: Result) -> dict:
        """Returns the row of sweep.json."""
        return {"flags": {name: number_or_text(value) for name, value in self.values.items()}, "seed": self.seed,
                "diverged": result.diverged_at is not None, **asdict(result), "folder": self.name}


@functools.cache
def train_samples(data_dir: str) -> int:
    return named.open_named(data_dir).train.samples


def number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def all_flags():
    """Returns this command's own flags and those of train.py that it does not replace."""
    values, others = flags.define(Options), train_flags.define()
    for name in others:
        if name not in values:
            values[name] = others[name]
    return values


def planned_runs(argv) -> tuple[Options, list[Planned]]:
    """Parses a command line. Raises UsageError, UserError, also for the flags of a single run."""
    recipes, given = train_flags.recipes_first(argv[1:])
    recipes = [f"--flagfile={Path(one.partition('=')[2]).absolute()}" for one in recipes]
    values = flags.read(all_flags(), [argv[0], *given])
    options = flags.parsed(values, Options)
    if not options.sweep and options.seeds == 1:
        raise UsageError("there is nothing to sweep; give --sweep=FLAG=VALUES, such as --sweep=learning_rate=5,10,20, "
                         "or --seeds=NUMBER")
    if values.mode != "train":
        raise UsageError(f"--mode={values.mode}: a sweep only trains; remove it")
    if values["data_dir"].present:
        values.data_dir = named.absolute(values.data_dir)
    ours = {*flags.names(Options)}
    common = [line for group in GROUPS.values() for name in flags.names(group) if name not in ours
              and values[name].present for line in values[name].serialize().splitlines()]
    first = train_flags.parse([argv[0], *recipes, *common]).recipe.seed
    return options, [
        planned(options, [*recipes, *common], dict(combination), seed)
        for combination in itertools.product(*([(name, one) for one in listed] for name, listed in options.sweep))
        for seed in range(first, first + options.seeds)]


def planned(options: Options, common: list[str], values: dict[str, str], seed: int) -> Planned:
    """Returns one run. Raises UsageError for wrong flags, and UserError if it has no plan or its folder other flags."""
    words = (*common, *(f"--{name}={value}" for name, value in values.items()), f"--seed={seed}")
    settings = train_flags.parse(["train.py", *words])
    recipe = (f"--flagfile={settings.source}",) if settings.source else ()
    made = Planned(values, seed, (*recipe, *words))
    if not options.dry_run:  # a job of an array has its own workers, and submit.sh prints its plan
        try:
            plan_for(settings, 1, 1, train_samples(settings.recipe.data_dir))
        except UserError as error:
            raise UserError(f"{made.name}: {error}") from None
    folder = Path(options.output_dir).absolute() / made.name
    if (folder / FLAGS).is_file():
        before, now = flags_in((folder / FLAGS).read_text()), flags_in(settings.text)
        for name in settings.identity:
            if not same(before.get(name, ""), now.get(name, "")):
                raise UserError(f"{folder} holds a run with --{name}={before.get(name, '')} instead of "
                                f"{now.get(name, '')}; choose another --output_dir")
    return made


def write_flags(folder: Path, runs: list[Planned]) -> None:
    """Writes N.flags for each run: the words of train.py's command line, one per line."""
    for old in folder.glob("*.flags"):
        if old.stem.isdecimal():
            old.unlink()
    for number, one in enumerate(runs):
        words = [*one.words, f"--output_dir={folder / one.name}"]
        write_atomically(folder / f"{number}.flags", "\n".join(words) + "\n")


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Context manager that waits until no other sweep writes to a folder, such as one whose `uv run` was killed."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(folder))
        except BlockingIOError:
            print(f"waiting for another sweep in {folder} to end", file=sys.stderr, flush=True)
            held.enter_context(locked(folder, wait=True))
        yield


def run(options: Options, runs: list[Planned]) -> list[dict]:
    """Trains the runs that are missing, unless --dry_run is given. Returns the rows of sweep.json."""
    folder = Path(options.output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        results = [Result.read(folder / one.name) for one in runs]
        if options.dry_run:
            write_flags(folder, runs)
            print(f"{len(runs)} runs, {sum(one is None for one in results)} to train: {folder}/0.flags to "
                  f"{len(runs) - 1}.flags", file=sys.stderr)
        rows = write_rows(folder, runs, results)
        for number, one in enumerate(runs):
            if not (options.dry_run or results[number]):
                print(f"run {number + 1} of {len(runs)}: {one.name}", file=sys.stderr, flush=True)
                results[number] = train_once(folder / one.name, one.words)
                print(f"  {described(results[number])}", file=sys.stderr, flush=True)
                rows = write_rows(folder, runs, results)
    print(f"report: {folder}/sweep.html", file=sys.stderr)
    return rows


def write_rows(folder: Path, runs: list[Planned], results: list[Result | None]) -> list[dict]:
    rows = [one.row(result) for one, result in zip(runs, results, strict=True) if result]
    write_sweep(folder, rows, len(runs))
    return rows


def described(result: Result) -> str:
    where, ended = result.diverged_at, f"top-1 {top1_of(asdict(result)):.2%}"
    if where:
        ended = f"diverged at step {where['step']} (epoch {where['epoch']:.3f})"
    best = "" if result.best_epoch is None else f", best top-1 {result.best_top1:.2%}"
    return f"{ended}{best}, {result.seconds:.0f} s"


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    if command.asks_for_help(argv):
        command.print_help(__doc__, *flags.described(all_flags(), flags.names(Options)), "",
                           "`uv run train.py --helpfull` lists the flags of train.py.")
        return 0
    with command.shell("experiments.sweep") as ending:
        print(as_json(run(*planned_runs(argv))), flush=True)
    return ending.code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
