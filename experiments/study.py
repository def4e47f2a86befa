"""Shows the effect of large batches on this machine: `uv run python -m experiments.study`.

It trains a small network without batch norm on `glyphs` with growing batch sizes, for the same number of epochs, with
two rules: SGD with linear scaling and gradual warm-up (Goyal et al. 2017), and LARS with the same warm-up. It writes a
table and a plot of accuracy against batch size, like figure 3 of arXiv:1708.03888, to OUTPUT_DIR/study.html.

The full study searches the learning rate of each rule at each batch size by factors of two, with one seed, until the
best rate has a worse one on either side, and then by factors of the square root of two. Then it trains with the best
rate and all seeds. --quick uses recorded rates and one seed. Each rule and batch size is a sweep (experiments.sweep) in
its own folder. If the study is stopped, the same command continues.
"""
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import command, flags
from experiments import sweep
from reporting.study import write_study

SMALL_BATCH = 64
BATCHES = (64, 256, 1024, 2048)
QUICK_BATCHES = (64, 1024, 2048)
SEEDS = 3
COMMON = ("--model=convnet", "--image_size=28", "--augmentation=none", "--epochs=20", "--weight_decay=5e-4",
          "--momentum=0.9", "--lr_schedule=poly", "--poly_power=2")
WARM = ("--warmup=gradual", "--warmup_epochs=2", "--warmup_learning_rate=0")


@dataclass(frozen=True)
class Rule:
    """A learning-rate rule. centre: the rate, for the small batch, at which the search starts."""

    title: str
    flags: tuple[str, ...]
    centre: float


RULES = {
    "linear": Rule("SGD, linear scaling and warm-up",
                   ("--optimizer=sgd", "--lr_scaling=linear", f"--base_batch_size={SMALL_BATCH}"), 0.025),
    "lars": Rule("LARS and warm-up", ("--optimizer=lars", "--trust_coefficient=0.001"), 20.0),
}
# For --quick: the best rates of the full search.
RECORDED = {
    ("linear", 64): 0.05, ("linear", 1024): 0.0125, ("linear", 2048): 0.025 * 2 ** -1.5,
    ("lars", 64): 5.0, ("lars", 1024): 40.0, ("lars", 2048): 40.0,
}


class Study:
    """The sweeps of a study over the learning rate, one per rule and batch size, each in its own folder."""

    def __init__(self, folder: Path, data_dir: str):
        self._folder, self._data_dir = folder, data_dir

    def top1(self, rule: str, batch: int, rates: Sequence[float], seeds: int = 1) -> list[list[float]]:
        """Trains with each rate and seed. Returns, for each rate, the validation top-1 after the last epoch by seed.

        A run that diverged has the accuracy of guessing.
        """
        warm = WARM if batch > SMALL_BATCH else ("--warmup=none",)
        words = (*COMMON, *RULES[rule].flags, *warm, f"--batch_size={batch}", f"--micro_batch_size={min(batch, 512)}",
                 "--checkpoint_every=1000")
        recipe = self._folder / f"{rule}-{batch}.flags"
        recipe.write_text("\n".join(words) + "\n")
        print(f"{RULES[rule].title}, batch {batch}, rates {', '.join(f'{rate:g}' for rate in rates)}, {seeds} seed"
              f"{'s' * (seeds > 1)}", file=sys.stderr, flush=True)
        rows = sweep.run(*sweep.planned_runs([
            "experiments.study", f"--flagfile={recipe}", f"--data_dir={self._data_dir}", f"--seeds={seeds}",
            f"--sweep=learning_rate={','.join(map(str, rates))}", f"--output_dir={self._folder / recipe.stem}"]))
        accuracies = [row["val_top1"] for row in rows]
        return [accuracies[start:start + seeds] for start in range(0, len(rows), seeds)]

    def best_rate(self, rule: str, batch: int) -> float:
        """Searches by factors of two from the rule's centre, then more finely around the best of these rates."""
        return rate_at(rule, self._climb(rule, batch, self._climb(rule, batch, 0, 2), 1))

    def _climb(self, rule: str, batch: int, exponent: int, step: int) -> int:
        """Changes the exponent (see rate_at) by this step until the best rate has a worse one on either side."""
        while True:
            neighbours = [exponent - step, exponent, exponent + step]
            accuracies = self.top1(rule, batch, [rate_at(rule, one) for one in neighbours])
            best = neighbours[accuracies.index(max(accuracies))]
            if best == exponent:
                return exponent
            exponent = best


def rate_at(rule: str, exponent: int) -> float:
    """Returns 2 ** (exponent / 2) times the rule's centre: the same float for every way to it."""
    return RULES[rule].centre * 2.0 ** (exponent / 2)


@dataclass(frozen=True)
class Options:
    """This command's flags.

    quick: Use recorded learning rates and one seed. It takes about ten minutes on two cores.
    output_dir: Folder for the runs and study.html.
    data_dir: Dataset.
    """

    quick: bool = False
    output_dir: str = "runs/study"
    data_dir: str = "glyphs"


def run(options: Options) -> list[dict]:
    """Trains the runs that are missing. Returns the rows of study.json."""
    folder = Path(options.output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    study, rows = Study(folder, options.data_dir), []
    for batch in QUICK_BATCHES if options.quick else BATCHES:
        for rule, described in RULES.items():
            rate = RECORDED[rule, batch] if options.quick else study.best_rate(rule, batch)
            [accuracies] = study.top1(rule, batch, [rate], 1 if options.quick else SEEDS)
            rows.append({"rule": described.title, "batch": batch, "rate": rate, "accuracies": accuracies})
            write_study(folder, rows, SMALL_BATCH)
    return rows


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    if command.asks_for_help(argv):
        command.print_help(__doc__, *flags.described(flags.define(Options), flags.names(Options)))
        return 0
    with command.shell("experiments.study") as ending:
        options = flags.parsed(flags.read(flags.define(Options), argv), Options)
        print(json.dumps(run(options)))
    return ending.code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
