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
        """Parses the value of a flag. Raises ValueError."""
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
    """What to train. The same on any number of workers.

    data_dir: Dataset to train on: a folder that data.prepare wrote, a folder of images (train/CLASS/* and val/CLASS/*),
        a built-in dataset (digits, glyphs), or synthetic:SAMPLES for random data that stays on the device.
    model: Model to train. ResNets are v1.5, those with _v1 as first published. resnet50_nvcaffe and alexnet_bn follow
        the files of the LARS authors, alexnet_bn5 is their variant with five norms. resnet20 and convnet (without batch
        norm) are for 32-pixel images.
    image_size: Input height and width in pixels. Default: the model's own.
    epochs: Number of passes over the training set. Can be a fraction.
    batch_size: Global batch size, summed over all workers. Also epoch:size pairs, such as 0:34816,30:69632.
    optimizer: Optimizer.
    learning_rate: Base learning rate. Also epoch:rate pairs, such as 0:29,30:50. Each rate holds from its epoch on.
    lr_scaling: How the learning rate grows with the batch size, from --base_batch_size to the first phase's.
    base_batch_size: Batch size that --learning_rate was chosen for.
    lr_schedule: How the learning rate decays.
    poly_power: Exponent of --lr_schedule=poly.
    decay_from: Where the decay starts counting epochs: at epoch 0 (start) or at the end of warm-up (warmup_end).
    lr_boundaries: Epochs at which --lr_schedule=multistep divides the learning rate by 10.
    warmup: Warm-up of the learning rate. gradual: a linear rise from --warmup_learning_rate. constant: that rate
        throughout.
    warmup_epochs: Length of the warm-up in epochs.
    warmup_learning_rate: Learning rate at the start of a gradual warm-up, or throughout a constant one.
    momentum: Momentum.
    momentum_schedule: How momentum depends on the batch size. noise_scale: 1 - (1 - momentum) * batch / 32768
        (arXiv:1811.05233, configuration B).
    weight_decay: Weight decay (L2 regularization).
    trust_coefficient: Trust coefficient of LARS.
    lars_epsilon: Term that is added to the denominator of the LARS trust ratio.
    exclude: Suffixes of the variables, such as gamma,beta,bias, that take no weight decay and no trust ratio, only a
        momentum step. --lars_exclude is an alias.
    label_smoothing: Label smoothing factor (arXiv:1512.00567, section 7).
    precision: Compute dtype of the forward and backward pass. mixed_float16 uses dynamic loss scaling. Variables and
        updates are float32.
    batch_norm_span: Batch-norm group size: number of samples over which batch norm computes its statistics (ghost batch
        norm below the micro-batch size, synchronized batch norm above it), on any number of workers. Also
        epoch:samples pairs, such as 0:16,30:32. Default: the micro-batch.
    batch_norm_momentum: Momentum of the moving mean and variance of batch norm.
    batch_norm_statistics: Batch-norm statistics for evaluation. moving: the moving averages. exact: measured on
        training batches before each evaluation (arXiv:1811.05233, section 3.2).
    augmentation: Augmentation of the training images. none: resize and centre crop. crop: mild random-resized crop.
        crop_flip: random-resized crop and flip (GoogLeNet). resnet: scale, crop, flip and colour (arXiv:1512.03385).
        caffe, alexnet: random crop and flip. full: crop_flip with warp, brightness, contrast and noise
        (arXiv:1811.05233, section 3.2).
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
    """What to train on: workers, their memory, devices and network.

    micro_batch_size: Number of samples that a worker processes at a time. Default: the largest divisor of batch size /
        workers up to 64.
    device: Device that trains the model. auto: GPUs if there are any. If nvidia-smi lists GPUs that TensorFlow cannot
        use, training stops with an error.
    dali_device: Device that decodes and augments the images. auto: the GPU if the model trains on one.
    dali_threads: Number of DALI threads per worker. Default: the number of cores of the worker.
    hw_decoder_load: Fraction of the images that the hardware JPEG decoder of a GPU decodes.
    stage_dir: Folder on a local disk of each node. The dataset is copied there first, once per node.
    allreduce: All-reduce algorithm for the gradients. torus: 2D-torus all-reduce on a grid of workers
        (arXiv:1811.05233, section 2.2).
    torus_grid: Grid of --allreduce=torus, horizontal x vertical, such as 4x2. auto: the grid with the lowest latency.
    fusion_mb: Fusion buffer size in MB, before compression. Default: 32 for a torus, the default of Horovod for a ring.
    compression: Compression of the gradients during the exchange.
    xla: What XLA compiles. true: the forward and backward pass as one unit, so the exchange of gradients cannot overlap
        it. auto: clusters of operations, without the exchange.
    deterministic: Reproduce the same weights, bit for bit, in every run on the same number of workers, also after a
        resume.
    elastic: Continue when workers are lost or join, under horovodrun --min-np=N --max-np=N
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
    def device_policy(self) -> str:
        """The device argument of distributed.gpus.check: "any" if only the images are bound to the CPU."""
        return "any" if self.device == "auto" and self.dali_device == "cpu" else self.device


@dataclass(frozen=True)
class Run:
    """How to run it: where to write, when to save, what to do after a failure.

    mode: What to do. evaluate: evaluate the newest checkpoint in --checkpoint on the validation set.
    output_dir: Folder of the run. Default: a new folder in runs/. If it holds checkpoints, training resumes from them.
    checkpoint: Checkpoint for --mode=evaluate: RUN/checkpoints, or one checkpoint in it.
    resume: auto: resume from the newest checkpoint in --output_dir. never: delete what is there and start over.
    checkpoint_every: Time between checkpoints, in epochs (1, 0.5) or minutes (10m). The last step is always saved.
    on_divergence: What to do when the loss or a gradient becomes infinite or NaN, or the loss explodes. rollback: go
        back to the last checkpoint and skip the data that caused it.
    max_rollbacks: Number of rollbacks after which a divergence is an error.
    log_trust_ratios: Record the weight norm, gradient norm and trust ratio of each layer once per epoch, in TensorBoard
        and the report.
    save_augmentations: Write augmentations.png to the run's folder: training images as the model sees them.
    timeline: File for the Horovod timeline of the exchange, in the format of chrome://tracing.
    dry_run: Print the plan as JSON and exit.
    workers: Number of workers to plan for. Only with --dry_run.
    workers_per_node: Number of workers per node to plan for. Only with --dry_run. Default: as launched, or 4 with
        --workers, as in arXiv:1811.05233.
    train_samples: Number of training samples to plan for, if the dataset is not there. Only with --dry_run.
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
    """A whole command line.

    given: value of each flag before parsing. text: content of flags.txt, which reproduces the run. source: the default
    recipe, if it was read.
    """

    recipe: Recipe
    launch: Launch
    run: Run
    given: dict[str, object]
    text: str
    source: Path | None = None

    @property
    def flags(self) -> dict:
        """Every flag's value, as it was given. It has to be the same on all ranks."""
        return {f"--{name}": value for name, value in self.given.items()}

    @property
    def identity(self) -> dict:
        """The flags that identify a training: those of the recipe, except the data folder, which may move."""
        return {name: self.given[name] for name in names(Recipe) if name != "data_dir"}

