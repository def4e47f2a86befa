"""The rule of rehearsals: what stays of a recipe on a small network and small images, and what changes.

These stay: the optimizer, all rates, the form of the decay, momentum, weight decay, trust coefficient, epsilon,
exclusions, label smoothing, and the batch-norm span in samples. These change: the network (resnet20 for a ResNet,
convnet_bn for AlexNet-BN), the dataset (Fashion-MNIST at 16 pixels, without augmentation), the batch size (256 in the
first phase, then in the recipe's ratios, in multiples of the span), the precision (float32), and the number of updates:
at most 300 in warm-up, where a shorter one keeps its updates, and 750 in all.
"""
import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from model_zoo import MODELS
from optim.schedules import ENDING, LearningRate, Piecewise
from plan.plan import Phase, Plan, make_plan
from plan.settings import Recipe

UPDATES, WARMUP, BATCH, IMAGE_SIZE = 750, 300, 256, 16
GRAIN = 32  # batches are multiples of it if there is no batch-norm span
TURNS = 60  # of a cosine from epoch 0, whose clock warm-up changes


@dataclass(frozen=True)
class Rehearsal:
    """How a recipe is rehearsed.

    flags: those that replace the recipe's. updates, warmup: numbers of updates in the recipe and in the rehearsal.
    """

    flags: dict[str, object]
    updates: tuple[float, float]
    warmup: tuple[float, float]


def small_network(model: str) -> str | None:
    """Returns the network that stands for another one, or None if none does: AlexNet's LRN wants unscaled pixels."""
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
               "augmentation": "none", "precision": "float32", "epochs": small.epoch(plan.epochs),
               "learning_rate": small.schedule(rates(plan.learning_rate, small.warm)),
               "batch_size": small.schedule((phase.start_epoch, small.batch(phase)) for phase in plan.phases),
               "lr_scaling": "none", "momentum": plan.momentum_of(plan.phases[0]), "momentum_schedule": "constant",
               "evaluate_every": 1, "stop_at_target": "false"}
    if small.warm:
        changed |= {"warmup_epochs": small.epoch(small.warm), "decay_from": "warmup_end"}
    if recipe.lr_boundaries:
        changed["lr_boundaries"] = ",".join(f"{small.epoch(epoch):.9g}" for epoch in recipe.lr_boundaries)
    if recipe.batch_norm_span:
        changed["batch_norm_span"] = small.schedule(recipe.batch_norm_span.pairs)
    if recipe.last_gamma is None and MODELS[recipe.model].last_gamma != MODELS["resnet20"].last_gamma:
        changed["last_gamma"] = MODELS[recipe.model].last_gamma
    return Rehearsal(changed, (small.before + small.after, small.warmup + small.rest), (small.before, small.warmup))


def rates(rate: LearningRate, warm: float) -> list[tuple[float, float]]:
    """Returns the pairs (epoch, rate) of a decay that counts from the end of warm-up and equals the recipe's.

    warm: the epoch at which warm-up ends. A cosine from epoch 0 has TURNS pairs, a power of the time left a factor.
    """
    final = rate.end if rate.decay in ENDING else 0.0
    whole = dataclasses.replace(rate, base=Piecewise(((0, 1),)), end=0)
    late = dataclasses.replace(whole, decay_from="warmup_end")

    def lost(epoch):
        """What the rate has lost to a decay that counts from epoch 0, as a factor."""
        return whole(epoch) / late(epoch) if rate.decay in ENDING and warm <= epoch < rate.epochs else 1.0

    turns = TURNS if rate.decay == "cosine" else 1
    cuts = {warm + (rate.epochs - warm) * turn / turns for turn in range(turns) if lost(warm) < 1}
    cuts = sorted(cuts.union(rate.base.boundaries))
    return [(epoch, final + (rate.base(epoch) - final) * lost(epoch)) for epoch in cuts]


class Compression:
    """A recipe's epochs as epochs of its rehearsal: warm-up and the rest are each a linear map of updates.

    grain: batches are multiples of it. None: of the batch-norm span of their phase. small_samples: number of training
    samples of the rehearsal. longest_warmup: in updates. warm: the recipe's epoch at which warm-up ends. before, after:
    updates until then and from then on; warmup, rest: the same in the rehearsal.
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
        """The first and last epoch of each part of the recipe's phases, which lies in warm-up or after it."""
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
