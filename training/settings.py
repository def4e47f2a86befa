"""Every setting of a training, typed, with its default and its help: what to train, on what, and how to run it.

Each field is a flag of train.py. Imports nothing heavy.
"""
import math
from dataclasses import dataclass
from pathlib import Path

import model_zoo
import optim
from common.flags import flag, names
from data.augmentation import AUGMENTATIONS
from distributed.allreduce_plan import ALLREDUCES, parse_grid
from optim import schedules
from optim.schedules import Piecewise


@dataclass(frozen=True)
class Every:
    """How often something is done: `1` or `0.5`, in epochs; `10m`, in minutes."""

    epochs: float = math.inf
    minutes: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "Every":
        """Raises ValueError."""
        every = cls(minutes=float(text[:-1])) if text.endswith("m") else cls(epochs=float(text))
        if not (every.epochs > 0 and every.minutes > 0):
            raise ValueError(f"'{text}' is neither a number of epochs nor one of minutes, such as 10m")
        return every

    def is_due(self, since: int, now: int, train_samples: int) -> bool:
        """Whether a multiple of the epochs lies between two positions in the stream."""
        length = self.epochs * train_samples
        return now // length > since // length

    def has_passed(self, seconds: float) -> bool:
        return seconds >= 60 * self.minutes


def _sizes(text: str) -> Piecewise:
    return _within(Piecewise.parse(text, int), 1, 2**31 - 1)


def _rates(text: str) -> Piecewise:
    return _within(Piecewise.parse(text), 0, 1e30)


def _within(pieces, low, high):
    if not all(low <= number <= high for number in pieces.values):
        raise ValueError("out of range")
    return pieces


def _boundaries(texts: list[str]) -> tuple[float, ...]:
    boundaries = tuple(map(float, texts))
    if list(boundaries) != sorted(set(boundaries)):
        raise ValueError("the epochs must rise")
    return boundaries


@dataclass(frozen=True)
class Recipe:
    """What to train: the same on any number of workers.

    data_dir: A prepared dataset's folder; one with train/ and val/ of a folder of images a class; built in: digits,
        glyphs; synthetic:SAMPLES, random data that stays on the device.
    model: The network.
    image_size: Pixels a side of the network's input; by default what the model is meant for.
    epochs: Length of the training, in passes over the training set.
    batch_size: Global batch size, summed over the workers; or epoch:size pairs, 0:34816,30:69632.
    optimizer: The update rule.
    learning_rate: Base rate; or epoch:rate pairs, 0:29,30:50, each holding from its epoch on.
    lr_scaling: How the rate grows from --base_batch_size to the first phase's batch size.
    base_batch_size: The batch size that --learning_rate is meant for.
    lr_schedule: How the rate decays.
    poly_power: The power of --lr_schedule=poly.
    decay_from: Whether decay counts from epoch 0 or warm-up's end.
    lr_boundaries: Epochs at which multistep cuts the rate to a tenth.
    warmup: gradual rises to the rate, constant stays at the warm-up rate.
    warmup_epochs: Length of the warm-up.
    warmup_learning_rate: The rate at which warm-up starts, or stays.
    momentum: Momentum.
    momentum_schedule: noise_scale: 1 - (1 - momentum) * batch / 32768 (arXiv:1811.05233, configuration B).
    weight_decay: Weight decay.
    trust_coefficient: LARS's trust coefficient.
    lars_epsilon: Added to the denominator of LARS's trust ratio.
    exclude: Suffixes of variables (gamma,beta,bias) that take no weight decay, and no trust ratio: a plain momentum
        step. --lars_exclude is an alias.
    label_smoothing: Probability spread evenly over all classes.
    precision: Compute dtype of the forward and backward pass. mixed_float16 uses dynamic loss scaling. Updates are in
        float32.
    batch_norm_span: Samples whose statistics batch norm takes together, however many a worker holds; or epoch:samples
        pairs, 0:16,30:32. By default the micro-batch.
    batch_norm_momentum: Momentum of batch norm's moving statistics.
    batch_norm_statistics: What evaluation uses; exact: measured on training batches before each (arXiv:1811.05233,
        3.2).
    augmentation: How training images are varied.
    seed: Seed of the initial weights, the order of samples and the augmentation.
    """

    data_dir: str = "digits"
    model: str = flag("resnet20", model_zoo.MODELS)
    image_size: int | None = flag(low=1, high=4096)
    epochs: float = flag(90.0, low=1e-9, high=1e5)
    batch_size: Piecewise = flag("256", parse=_sizes)
    optimizer: str = flag("lars", optim.OPTIMIZERS)
    learning_rate: Piecewise = flag("5", parse=_rates)
    lr_scaling: str = flag("none", schedules.SCALINGS)
    base_batch_size: int = flag(256, low=1)
    lr_schedule: str = flag("poly", schedules.DECAYS)
    poly_power: float = flag(2.0, low=0.0)
    decay_from: str = flag("start", schedules.DECAY_CLOCKS)
    lr_boundaries: tuple[float, ...] = flag([], parse=_boundaries)
    warmup: str = flag("none", schedules.WARMUPS)
    warmup_epochs: float = flag(0.0, low=0.0)
    warmup_learning_rate: float = flag(0.0, low=0.0)
    momentum: float = flag(0.9, low=0.0, high=1.0)
    momentum_schedule: str = flag("constant", schedules.MOMENTUM_SCHEDULES)
    weight_decay: float = flag(0.0, low=0.0)
    trust_coefficient: float = flag(0.001, low=0.0)
    lars_epsilon: float = flag(0.0, low=0.0)
    exclude: tuple[str, ...] = flag([], parse=tuple, alias="lars_exclude")
    label_smoothing: float = flag(0.0, low=0.0, high=1.0)
    precision: str = flag("float32", ("float32", "mixed_float16", "mixed_bfloat16"))
    batch_norm_span: Piecewise | None = flag(parse=_sizes)
    batch_norm_momentum: float = flag(0.9, low=0.0, high=1.0)
    batch_norm_statistics: str = flag("moving", ("moving", "exact"))
    augmentation: str = flag("none", AUGMENTATIONS)
    seed: int = flag(0, low=0, high=2**32 - 1)


@dataclass(frozen=True)
class Launch:
    """On what to train: workers, their memory, devices and network.

    micro_batch_size: Samples that a worker holds in memory at a time; by default the largest divisor of batch /
        workers that is at most 64.
    device: Where the model trains. auto: on GPUs where there are any; it is an error if nvidia-smi lists GPUs that
        TensorFlow cannot use.
    dali_device: Where images are decoded and augmented. auto: on the GPU if the model trains on one.
    dali_threads: DALI's threads a worker; by default the cores that it has.
    hw_decoder_load: The share of images that go to a GPU's hardware decoder.
    stage_dir: A folder on a disk of each node's own, to which the dataset is copied first, once a node.
    allreduce: How gradients are summed over the workers; torus: along the rows of a grid, then its columns
        (arXiv:1811.05233, 2.2).
    torus_grid: Grid of --allreduce=torus, horizontal x vertical, such as 4x2; auto: the one in which messages take the
        least time.
    fusion_mb: Fusion buffer size in MB, before compression; by default 32 in a torus, and in a ring what Horovod does.
    compression: Compression of gradients while they are exchanged.
    xla: What XLA compiles. true: the forward and backward pass, as a whole, so that the exchange of gradients cannot
        overlap it. auto: clusters of operations, which leave the exchange out.
    deterministic: The same weights, to the bit, each time on the same number of workers, whether stopped and resumed
        or not.
    elastic: Go on when workers are lost or join, under horovodrun --min-np=N --max-np=N
        --host-discovery-script=SCRIPT.
    """

    micro_batch_size: int | None = flag(low=1)
    device: str = flag("auto", ("auto", "cpu", "gpu"))
    dali_device: str = flag("auto", ("auto", "cpu", "gpu"))
    dali_threads: int | None = flag(low=1)
    hw_decoder_load: float = flag(0.65, low=0.0, high=1.0)
    stage_dir: str | None = None
    allreduce: str = flag("ring", ALLREDUCES)
    torus_grid: tuple[int, int] | None = flag("auto", parse=parse_grid)
    fusion_mb: float | None = flag(low=1e-3, high=1e5)
    compression: str = flag("none", ("none", "fp16"))
    xla: str = flag("false", ("false", "true", "auto"), switch=True)
    deterministic: bool = False
    elastic: bool = False

    @property
    def devices(self) -> str:
        """What distributed.gpus.check takes: "any" where only the images are bound to the CPU."""
        return "any" if self.device == "auto" and self.dali_device == "cpu" else self.device


@dataclass(frozen=True)
class Run:
    """How to run it: where to write, when to save, what to do when something goes wrong.

    mode: evaluate: the newest of --checkpoint on the validation set.
    output_dir: The run's folder; by default a new one under runs/.
    checkpoint: For --mode=evaluate: RUN/checkpoints, or one of those in it.
    resume: auto: go on from the newest checkpoint in --output_dir, if there is one; never: start anew, and remove what
        is there.
    checkpoint_every: From one checkpoint to the next: 1 or 0.5, in epochs; 10m, in minutes. There is always one at the
        end.
    on_divergence: What to do when the loss or a gradient is no longer a number, or the loss explodes: stop, or go back
        to the last checkpoint and on with the data after those that did it.
    max_rollbacks: How often to roll back before it is an error.
    log_trust_ratios: Record the norms of each layer's weights and gradients and its trust ratio, an epoch each, in
        TensorBoard and the report.
    save_augmentations: Write augmentations.png into the run's folder: training images as the network sees them.
    timeline: A file for Horovod's timeline of the exchange, for chrome://tracing.
    dry_run: Print the plan as JSON and stop.
    workers: With --dry_run: plan for so many workers.
    workers_per_node: With --dry_run: so many on each node; by default as launched, or with --workers 4, as in
        arXiv:1811.05233.
    train_samples: With --dry_run: plan for so many training samples, without the dataset.
    """

    mode: str = flag("train", ("train", "evaluate"))
    output_dir: str | None = None
    checkpoint: str | None = None
    resume: str = flag("auto", ("auto", "never"))
    checkpoint_every: Every = flag("1", parse=Every.parse)
    on_divergence: str = flag("stop", ("stop", "rollback"))
    max_rollbacks: int = flag(3, low=0)
    log_trust_ratios: bool = False
    save_augmentations: bool = False
    timeline: str | None = None
    dry_run: bool = False
    workers: int | None = flag(low=1)
    workers_per_node: int | None = flag(low=1)
    train_samples: int | None = flag(low=1)


@dataclass(frozen=True)
class Settings:
    """A whole command line. given: each flag's value before it was parsed. text: flags.txt, which runs it again.

    source: the recipe that was read where none was named.
    """

    recipe: Recipe
    launch: Launch
    run: Run
    given: dict[str, object]
    text: str
    source: Path | None = None

    @property
    def flags(self) -> dict:
        """Every flag's value, as it was given, which has to be the same on all ranks."""
        return {f"--{name}": value for name, value in self.given.items()}

    @property
    def identity(self) -> dict:
        """What a training is of: the recipe's flags but for the folder of the data, which may move."""
        return {name: self.given[name] for name in names(Recipe) if name != "data_dir"}

