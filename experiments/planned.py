"""The runs of experiments.sweep, from its flags: combinations of values, the lines of a file, and seeds."""
import functools
import hashlib
import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from common import flags
from common.errors import UsageError, UserError
from common.files import write_atomically
from common.flags import flag
from data import named
from experiments.trainings import Result, passed_on
from optim.schedules import scaled
from plan import flags as train_flags
from plan.output_dir import changed_flag
from plan.plan import plan_for
from plan.recipes import RECIPES, flags_in
from plan.settings import Recipe
from plan.values import number_or_text

GROUPS = train_flags.GROUPS
SWEPT = (*(name for name in (*flags.names(GROUPS["Recipe"]), *flags.names(GROUPS["Launch"])) if name != "seed"),
         "init_checkpoint", "on_divergence", "max_rollbacks")
LISTS = {field.name for group in GROUPS.values() for field in fields(group)
         if isinstance(field.metadata.get("given"), list)}
LONGEST = 150  # characters in the name of a run's folder
SEED = "give --seeds=NUMBER instead of seed; --seed is the first"


def swept(texts: list[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Parses the values of --sweep to (flag, values) pairs. Raises ValueError."""
    pairs = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name == "seed":
            raise ValueError(SEED)
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
    """This command's own flags."""

    sweep: tuple[tuple[str, tuple[str, ...]], ...] = flag([], "Flag of train.py and its values, such as "
        "learning_rate=5,10,20. Can be given several times. Every combination is trained.", parse=swept, repeated=True)
    runs: str | None = flag(None, "File whose lines are the flags of runs. Each line is combined with the values of "
        "--sweep.", path=True)
    seeds: int = flag(1, "Number of seeds for each combination. They count up from --seed.", low=1, high=10_000)
    search_rate: bool = flag(False, "Search the best learning rate of each combination, then train it with all seeds.")
    search_data_dir: str | None = flag(None, "Dataset of --search_rate, such as fashion_holdout, so that no rate is "
        "chosen on the validation images of --data_dir, on which the best ones are then trained. Default: --data_dir.",
        path=True)
    output_dir: str = flag("runs/sweep", "Folder for the runs, sweep.json and sweep.html.", path=True, written=True)
    dry_run: bool = flag(False, "Check the flags, and write those of each run to a file and the results so far, but "
        "train nothing.")


@dataclass(frozen=True)
class Planned:
    """A run of the sweep."""

    values: dict[str, str]  # swept flag -> its value as text
    seed: int
    words: tuple[str, ...]  # the command line of train.py, without --output_dir

    @property
    def name(self) -> str:
        """The folder's name: flags and values. If that is long or has unusual characters, it is cut, with a hash."""
        text = ",".join(f"{name}={value}" for name, value in (*self.values.items(), ("seed", self.seed)))
        plain = re.sub(r"[^\w.:+=,-]", "_", text)[:LONGEST]
        return plain if plain == text else f"{plain},{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def row(self, result: Result) -> dict:
        """Returns the row of sweep.json."""
        return {"flags": {name: number_or_text(value) for name, value in self.values.items()}, "seed": self.seed,
                "diverged": result.diverged_at is not None, **asdict(result), "folder": self.name,
                "command": shlex.join(["uv", "run", "train.py", *self.words])}


def read(argv: Sequence[str]) -> tuple[Options, list[str], list[dict[str, str]]]:
    """Reads a command line. Returns (options, flags of train.py for all runs, swept flags of each combination).

    Raises UsageError, also for a line of --runs, and OSError if that file is missing.
    """
    recipes, given = train_flags.recipes_first(argv[1:])
    values = flags.read(train_flags.define(Options), [argv[0], *given])
    options = flags.parsed(values, Options)
    if not (options.sweep or options.runs or options.search_rate) and options.seeds == 1:
        raise UsageError("there is nothing to sweep; give --sweep=FLAG=VALUES, such as --sweep=learning_rate=5,10,20, "
                         "--runs=FILE, or --seeds=NUMBER")
    if options.search_data_dir and not options.search_rate:
        raise UsageError("--search_data_dir requires --search_rate")
    if options.search_rate and options.dry_run:
        raise UsageError("--search_rate: a search needs results; remove --dry_run")
    if values.mode != "train":
        raise UsageError(f"--mode={values.mode}: a sweep only trains; remove it")
    if values["data_dir"].present:
        values.data_dir = named.absolute(values.data_dir)
    lines = lines_of(options.runs) if options.runs else [{}]
    for name, _ in options.sweep:
        if any(name in line for line in lines):
            raise UsageError(f"--sweep={name}: {options.runs} has --{name}, too; remove one of them")
    if options.search_rate and "learning_rate" in dict(options.sweep):
        raise UsageError("--search_rate searches the learning rate; remove --sweep=learning_rate")
    crossed = itertools.product(*([(name, value) for value in listed] for name, listed in options.sweep))
    common = [*recipes, *passed_on(values, Options)]
    return options, common, [line | dict(pairs) for line, pairs in itertools.product(lines, crossed)]


@functools.cache
def train_samples(data_dir: str) -> int:
    return named.open_named(data_dir).train.samples


def lines_of(file: str) -> list[dict[str, str]]:
    """Returns flag -> value for each line of a --runs file. Raises UsageError, and OSError if it is missing."""
    lines = []
    for number, text in enumerate(flags.file_text(file).splitlines(), 1):
        try:
            line = flags_of_line(shlex.split(text, comments=True))
        except (ValueError, UsageError) as error:
            raise UsageError(f"--runs={file}, line {number}: {error}") from None
        if line and line not in lines:
            lines.append(line)
    if not lines:
        raise UsageError(f"--runs={file}: the file has no line with flags")
    return lines


def flags_of_line(words: list[str]) -> dict[str, str]:
    """Returns flag -> value of the words in a line of --runs, the recipe first. Raises UsageError."""
    recipes, rest = train_flags.recipes_first(words)
    if len(recipes) > 1:
        raise UsageError("--flagfile is given twice; give one recipe")
    values = flags.read(train_flags.define(), ["train.py", *rest])
    given = [name for group in GROUPS.values() for name in flags.names(group) if values[name].present]
    for name in given:
        if name not in SWEPT:
            raise UsageError(SEED if name == "seed" else f"--{name} cannot differ between runs; put it on the command "
                                                         "line")
        if values[name].present > 1:
            raise UsageError(f"--{name} is given twice")
    texts = flags_in("\n".join(values[name].serialize() for name in given))
    return {"flagfile": recipes[0].partition("=")[2]} | texts if recipes else texts


def named_values(values: dict[str, str]) -> dict[str, str]:
    """Returns swept flags for names and tables: a recipe of recipes/ has its name instead of its path."""
    if "flagfile" not in values:
        return values
    path = Path(values["flagfile"]).absolute()
    if path.is_relative_to(RECIPES):
        return values | {"flagfile": str(path.relative_to(RECIPES).with_suffix(""))}
    return values


def settings_of(common: Sequence[str], values: dict[str, str], *more: str) -> tuple[train_flags.Settings, list[str]]:
    """Returns the settings of a combination, and the words of its command line. Raises UsageError, UserError."""
    own = [f"--{name}={value}" for name, value in values.items() if name != "flagfile"]
    if "flagfile" in values:
        own.append(f"--flagfile={values['flagfile']}")
    recipes, rest = train_flags.recipes_first([*common, *own, *more])  # the order matters in N.flags
    words = [*recipes, *rest]
    settings = train_flags.parse(["train.py", *words])
    return settings, [*settings.source.words, *words]


def planned(options: Options, common: Sequence[str], values: dict[str, str], seed: int,
            learning_rate: float | None = None) -> Planned:
    """Returns one run. Raises UsageError for wrong flags, and UserError as in `checked`.

    learning_rate: replaces the one in `values`, in a search. A gradual warm-up then starts at it, at most.
    """
    if learning_rate is not None:
        values = values | {"learning_rate": str(learning_rate)}
    settings, words = settings_of(common, values, f"--seed={seed}")
    if learning_rate is not None:
        settings, words = settings_of(common, values, f"--seed={seed}", *lower_warmup(settings.recipe))
    made = Planned(named_values(values), seed, tuple(words))
    # With --dry_run, the runs are jobs of an array with other workers, and submit.sh prints their plans.
    return checked(made, settings, Path(options.output_dir).absolute(), plans=not options.dry_run)


def lower_warmup(recipe: Recipe) -> list[str]:
    """Returns the flag with which a gradual warm-up starts at the learning rate, if it would start above it."""
    [rate] = scaled(recipe.learning_rate, recipe.lr_scaling, recipe.base_batch_size, recipe.batch_size.values[0]).values
    is_above = recipe.warmup == "gradual" and recipe.warmup_learning_rate > rate
    return [f"--warmup_learning_rate={rate}"] if is_above else []


def checked(made: Planned, settings: train_flags.Settings, output_dir: Path, plans: bool = True) -> Planned:
    """Returns the run. Raises UserError if it has no plan on one worker, or if its folder holds a run with other flags.

    plans: whether to check the plan.
    """
    if plans:
        try:
            train_flags.check_own(settings)
            plan_for(settings, 1, 1, train_samples(settings.recipe.data_dir))
        except UserError as error:
            raise UserError(f"{made.name}: {error}") from None
    folder = output_dir / made.name
    if changed := changed_flag(folder, settings):
        name, before, now = changed
        raise UserError(f"{folder} holds a run with --{name}={before} instead of {now}; choose another --output_dir")
    return made


def write_flags(folder: Path, runs: list[Planned]) -> None:
    """Writes N.flags for each run: the words of train.py's command line, one per line."""
    for old in folder.glob("*.flags"):
        if old.stem.isdecimal():
            old.unlink()
    for number, run in enumerate(runs):
        words = [*run.words, f"--output_dir={folder / run.name}"]
        write_atomically(folder / f"{number}.flags", "\n".join(words) + "\n")
