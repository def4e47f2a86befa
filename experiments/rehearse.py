"""Rehearses recipes: `python -m experiments.rehearse RECIPE [RECIPE ...] --output_dir=FOLDER [flags of train.py]`.

A rehearsal trains a recipe on a small network and small images, at the recipe's own learning rates, before GPU hours
are spent. RECIPE is a file, a recipe of recipes/ by its name, or a .runs file of experiments.sweep. Flags of
train.py replace those of the recipes, such as --trust_coefficient=0.01.

The rule is the same for every recipe, and each change is printed. These stay: the optimizer, all rates, the form of the
decay, momentum, weight decay, trust coefficient, epsilon, exclusions, the loss, label smoothing, mixing, stochastic
depth, and the batch-norm span in samples. These change: the network (resnet20 for a ResNet, convnet_bn for AlexNet-BN),
the dataset (Fashion-MNIST at 16 pixels, without augmentation), the batch size (256 in the first phase, then in the
recipe's ratios, in multiples of the span), the precision (float32), and the number of updates: at most 300 in warm-up,
where a shorter one keeps its updates, and 750 in all.

The verdicts:
  trains                   the top-1 is at least 80 % of that of a fixed training with SGD
  does not train           it is lower
  diverges at update N
  does not discriminate    the rehearsal cannot tell: 16 times the rate trains, too, or the recipe diverges, but not
                           with all updates of its warm-up, or the training with SGD diverges
  not transferable         there is no small network of this kind

The first recipe of each network and optimizer that trains is trained again at 2, 4, 8 and 16 times its rates, until one
no longer trains.

The runs are those of a sweep in --output_dir: its page is sweep.html, and the same command continues it. Standard
output has a line of JSON for each recipe: recipe, verdict, trains (null if the rehearsal cannot tell), diverged_at,
val_top1, reference_top1, seconds, and reference_seconds.
"""
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common import command, flags, metric
from common.errors import UsageError
from common.files import as_json
from common.flags import flag
from common.run_folder import METRICS, RunFolder, top1_of
from experiments.planned import Planned, checked, flags_of_line, lines_of, named_values, settings_of, train_samples
from experiments.sweep import Sweep, alone_in
from experiments.trainings import Result, help_of, passed_on
from model_zoo import MODELS
from optim.schedules import ENDING, LearningRate, Piecewise
from plan import flags as train_flags
from plan.plan import Phase, Plan, make_plan
from plan.recipes import DIGITS, recipe_path
from plan.settings import Recipe
from plan.values import same

PROGRAM = "experiments.rehearse"
UPDATES, WARMUP, BATCH, IMAGE_SIZE = 750, 300, 256, 16
GRAIN = 32  # batch sizes are multiples of it if there is no batch-norm span
STEPS_OF_COSINE = 60  # constant rates that approximate a cosine which counts from epoch 0
TRAINS = 0.8  # of the reference's top-1
FACTORS = (2, 4, 8, 16)  # of the rates
REFERENCE = {  # flags in place of those of digits.flags
    "optimizer": "sgd", "learning_rate": 0.1, "lr_schedule": "poly", "poly_power": 2, "warmup": "none", "momentum": 0.9,
    "weight_decay": 1e-4, "batch_size": BATCH, "batch_norm_span": 32, "batch_norm_momentum": 0.9,
    "image_size": IMAGE_SIZE, "augmentation": "none", "evaluate_every": 1}


@dataclass(frozen=True)
class Options:
    """This command's own flags."""

    output_dir: str = flag("runs/rehearsal", "Folder for the runs, sweep.json and sweep.html.", path=True, written=True)
    data_dir: str = flag("fashion", "Small dataset of the rehearsals. The references of another one are its own.",
        path=True)


@dataclass(frozen=True)
class Rehearsal:
    """How a recipe is rehearsed."""

    flags: dict[str, object]  # replace those of the recipe
    updates: tuple[float, float]  # number in the recipe, and in the rehearsal
    warmup: tuple[float, float]  # the same for the updates of warm-up


def small_network(model: str) -> str | None:
    """Returns the small network of the same kind, or None: AlexNet has none, because its LRN needs unscaled pixels."""
    if MODELS[model].is_residual:
        return "resnet20"
    return "convnet_bn" if model.startswith("alexnet_bn") else model if model.startswith("convnet") else None


def rehearsal(recipe: Recipe, samples: int, data_dir: str, small_samples: int, longest_warmup: float = WARMUP
              ) -> Rehearsal:
    """Returns the rehearsal of a recipe by the rule above. Raises UserError if the recipe has no plan.

    samples, small_samples: numbers of training samples of the recipe's dataset and of data_dir. longest_warmup: in
    updates. Momentum is that of the recipe's first phase.
    """
    plan = make_plan(recipe, None, 1, samples)
    small = Compression(plan, GRAIN if recipe.batch_norm_span is None else None, small_samples, longest_warmup)
    changed = {"data_dir": data_dir, "model": small_network(recipe.model), "image_size": IMAGE_SIZE,
               "augmentation": "none", "rand_augment": "none", "repeats": 1, "precision": "float32",
               "epochs": small.epoch(plan.epochs),
               "learning_rate": small.schedule(rates(plan.learning_rate, small.warm)),
               "batch_size": small.schedule((phase.start_epoch, small.batch(phase)) for phase in plan.phases),
               "lr_scaling": "none", "momentum": plan.momentum_of(plan.phases[0]), "momentum_schedule": "constant",
               "evaluate_every": 1, "stop_at_target": "false"}
    if small.warm:
        changed |= {"warmup_epochs": small.epoch(small.warm), "decay_from": "warmup_end"}
    if recipe.validation_size:
        changed["validation_size"] = IMAGE_SIZE
    if recipe.lr_boundaries:
        changed["lr_boundaries"] = ",".join(f"{small.epoch(epoch):.9g}" for epoch in recipe.lr_boundaries)
    if recipe.batch_norm_span:
        changed["batch_norm_span"] = small.schedule(recipe.batch_norm_span.pairs)
    if recipe.last_gamma is None and MODELS[recipe.model].last_gamma != MODELS["resnet20"].last_gamma:
        changed["last_gamma"] = MODELS[recipe.model].last_gamma
    return Rehearsal(changed, (small.before + small.after, small.warmup + small.rest), (small.before, small.warmup))


def rates(rate: LearningRate, warm: float) -> list[tuple[float, float]]:
    """Returns the pairs (epoch, rate) of a decay that counts from the end of warm-up and equals the recipe's.

    warm: the epoch at which warm-up ends. A cosine that counts from epoch 0 becomes STEPS_OF_COSINE constant rates. For
    a power of the time left, a constant factor is exact.
    """
    final = rate.end if rate.decay in ENDING else 0.0
    whole = dataclasses.replace(rate, base=Piecewise(((0, 1),)), end=0)
    late = dataclasses.replace(whole, decay_from="warmup_end")

    def lost(epoch):
        """The decay that counts from epoch 0 as a fraction of the one that counts from the end of warm-up."""
        return whole(epoch) / late(epoch) if rate.decay in ENDING and warm <= epoch < rate.epochs else 1.0

    steps = STEPS_OF_COSINE if rate.decay == "cosine" else 1
    cuts = {warm + (rate.epochs - warm) * step / steps for step in range(steps) if lost(warm) < 1}
    cuts = sorted(cuts.union(rate.base.boundaries))
    return [(epoch, final + (rate.base(epoch) - final) * lost(epoch)) for epoch in cuts]


class Compression:
    """A recipe's epochs as epochs of its rehearsal: warm-up and the rest are each a linear map of updates.

    grain: batch sizes are multiples of it. None: of the batch-norm span of their phase. small_samples: number of
    training samples of the rehearsal. longest_warmup: in updates.

    Attributes:
        warm: the recipe's epoch at which warm-up ends
        before, after: the recipe's updates until then, and from then on
        warmup, rest: the same in the rehearsal
    """

    def __init__(self, plan: Plan, grain: int | None, small_samples: int, longest_warmup: float):
        self._plan, self._grain, self._small_samples = plan, grain, small_samples
        rate = plan.learning_rate
        self.warm = min(rate.warmup_epochs, plan.epochs) if rate.warmup != "none" else 0
        self.before = sum(self._updates(part) for part in self._parts if part[0] < self.warm)
        self.after = sum(self._updates(part) for part in self._parts if part[0] >= self.warm)
        self.warmup = min(self.before, longest_warmup)
        self.rest = min(self.after, UPDATES - min(self.before, WARMUP))

    @cached_property
    def _parts(self) -> list[tuple[float, float, Phase]]:
        """(start, end, phase) of each part of the recipe, cut at its phases and at the end of warm-up; in epochs."""
        cuts = sorted({0, self.warm, self._plan.epochs, *(phase.start_epoch for phase in self._plan.phases)})
        return [(*pair, self._plan.phase_at(pair[0])) for pair in itertools.pairwise(cuts)]

    def _updates(self, part: tuple[float, float, Phase]) -> float:
        start, stop, phase = part
        return (stop - start) * self._plan.train_samples / phase.global_batch_size

    def batch(self, phase: Phase) -> int:
        """Returns the rehearsal's batch size in a phase of the recipe."""
        grain = self._grain or phase.batch_norm_span
        growth = phase.global_batch_size / self._plan.phases[0].global_batch_size
        return grain * max(1, round(BATCH * growth / grain))

    def epoch(self, epoch: float) -> float:
        """Returns the rehearsal's epoch at an epoch of the recipe."""
        epochs = 0
        for start, stop, phase in self._parts:
            if start < epoch:
                share = self.warmup / self.before if start < self.warm else self.rest / self.after
                updates = self._updates((start, min(stop, epoch), phase)) * share
                epochs += updates * self.batch(phase) / self._small_samples
        return round(epochs, 6)

    def schedule(self, pairs: Iterable[tuple[float, float]]) -> str:
        """Returns a flag's value: a number, or `EPOCH:NUMBER,...` in the rehearsal's epochs. pairs: in the recipe's."""
        values = {self.epoch(epoch): f"{value:.12g}" for epoch, value in pairs}
        return ",".join(f"{epoch:.9g}:{value}" for epoch, value in values.items()) if len(values) > 1 else values[0]


class Stage:
    """The trainings of rehearsals in a folder."""

    def __init__(self, folder: Path, data_dir: str):
        self._folder, self._data_dir, self._sweep = folder, data_dir, Sweep(folder, None)
        self._discriminates: dict[tuple[str, str], bool] = {}  # (network, optimizer) -> whether higher rates fail

    def plan(self, values: dict[str, str], longest_warmup: float = WARMUP, **label: str
             ) -> tuple[Rehearsal, Planned, list[str]]:
        """Returns a recipe's rehearsal, its run, and a line for each flag that it changes. Raises UserError.

        values: the recipe as flag -> value. label: added to the name of the run.
        """
        before, _ = settings_of([], values)
        samples = before.run.train_samples or train_samples(before.recipe.data_dir)
        made = rehearsal(before.recipe, samples, self._data_dir, train_samples(self._data_dir), longest_warmup)
        run, after = self._run(values, made.flags, named_values(values) | label)
        pairs = [(name, before.given[name], after.given[name]) for name in flags.names(Recipe)]
        return made, run, [f"{name}: {old} -> {new}" for name, old, new in pairs if not same(old, new)]

    def _run(self, values, replaced, label):
        after, words = settings_of([], values, *(f"--{name}={value}" for name, value in replaced.items()))
        return checked(Planned(label, after.recipe.seed, tuple(words)), after, self._folder), after

    def train(self, run: Planned) -> Result:
        [result] = self._sweep.train([run])
        return result

    def reference(self, model: str, updates: float) -> Result:
        """Returns the result of the fixed training of a small network with SGD and as many updates."""
        epochs = round(updates * BATCH / train_samples(self._data_dir), 6)
        replaced = REFERENCE | {"data_dir": self._data_dir, "model": model, "epochs": epochs}
        label = {"model": model, "optimizer": "sgd", "reference": f"{updates:.0f} updates"}
        return self.train(self._run({"flagfile": str(DIGITS)}, replaced, label)[0])

    def rehearse(self, values: dict[str, str]) -> dict:
        """Rehearses a recipe. Prints and returns its row of JSON. Raises UserError."""
        recipe, named = settings_of([], values)[0].recipe, dict(named_values(values))
        name = " ".join([named.pop("flagfile"), *(f"--{flag}={value}" for flag, value in named.items())])
        print(f"\n{name}", file=sys.stderr)
        trains, verdict, result, reference = None, "not transferable", None, None
        if model := small_network(recipe.model):
            made, run, changes = self.plan(values)
            for title, (old, new) in (("updates", made.updates), ("updates of warm-up", made.warmup)):
                changes.append(f"{title}: {old:,.0f} -> {new:,.0f}" + (
                    f", {old / new:.1f} times fewer" if old > new else ""))
            say(*changes, f"trains this recipe, then a reference with SGD: {made.updates[1]:,.0f} updates and one to "
                "three minutes on two cores each; then, once per network and optimizer, at 2 to 16 times the rates")
            result, reference = self.train(run), self.reference(model, made.updates[1])
            say(f"trained this recipe in {result.seconds:.0f} s and the reference in {reference.seconds:.0f} s")
            say(*(f"epoch {row['epoch']:g}: train loss {row[metric.TRAIN_LOSS] or math.nan:.4f}, "
                  f"top-1 {top1_of(row):.2%}"
                  for row in RunFolder(self._folder / run.name, reader=PROGRAM).rows(METRICS)))
            trains, verdict = self._judge(values, recipe, made, result, reference)
        say(verdict)
        row = {"recipe": name, "verdict": verdict, "trains": trains, "reference_top1": reference and reference.val_top1,
               "reference_seconds": reference and reference.seconds}
        row |= {key: getattr(result, key, None) for key in ("diverged_at", "val_top1", "seconds")}
        print(as_json(row), flush=True)
        return row

    def _judge(self, values, recipe: Recipe, made: Rehearsal, result: Result, reference: Result
               ) -> tuple[bool | None, str]:
        """Returns whether a recipe trains, None if the rehearsal cannot tell, and the verdict."""
        def trains(result):
            return not result.diverged_at and result.val_top1 >= TRAINS * reference.val_top1

        if reference.diverged_at:
            return None, "does not discriminate: the reference with SGD diverges"
        if result.diverged_at:
            verdict = f"diverges at update {result.diverged_at['step']}"
            if made.warmup[1] == made.warmup[0] or self.train(
                    self.plan(values, math.inf, warmup="all updates")[1]).diverged_at:
                return False, verdict
            return None, f"does not discriminate: {verdict}, but not with all updates of its warm-up"
        if not trains(result):
            return False, "does not train"
        family = small_network(recipe.model), recipe.optimizer
        if family not in self._discriminates:
            runs = (self.plan(values | multiplied(recipe, factor), rates=f"x{factor}")[1] for factor in FACTORS)
            self._discriminates[family] = not all(trains(self.train(run)) for run in runs)
        if self._discriminates[family]:
            return True, "trains"
        return None, f"does not discriminate: {FACTORS[-1]} times the rate trains, too"


def multiplied(recipe: Recipe, factor: float) -> dict[str, str]:
    """Returns the flags of a recipe with all rates multiplied."""
    rates = Piecewise(tuple((epoch, factor * rate) for epoch, rate in recipe.learning_rate.pairs))
    others = {name: str(factor * getattr(recipe, name)) for name in ("warmup_learning_rate", "end_learning_rate")}
    return {"learning_rate": str(rates)} | others


def say(*lines: str) -> None:
    print(*(f"  {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)


def run(argv) -> list[dict]:
    """Rehearses the recipes of a command line, and returns their rows. Raises UserError."""
    words = train_flags.define(Options)
    names, options = flags.read_with_arguments(words, argv), flags.parsed(words, Options)
    if not names:
        raise UsageError("give at least one RECIPE: a file, or a name of recipes/")
    given = flags_of_line(passed_on(words, Options))
    lines = [line for name in names
             for line in (lines_of(name) if name.endswith(".runs") else [{"flagfile": str(recipe_path(name))}])]
    recipes = [{"flagfile": line["flagfile"], **given, **line} for line in lines]
    folder = Path(options.output_dir).absolute()
    stage = Stage(folder, options.data_dir)
    for values in recipes:  # a wrong flag ends the command before the first run
        if small_network(settings_of([], values)[0].recipe.model):
            stage.plan(values)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        rows = [stage.rehearse(values) for values in recipes]
    print(f"report: {folder}/sweep.html", file=sys.stderr)
    return rows


@command.program(PROGRAM, __doc__, lambda _: help_of(Options), is_alone=True)
def main(argv) -> None:
    """Runs a command line."""
    run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
