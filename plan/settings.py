"""Every setting of a training, typed, with its default and its help: what to train, on what, and how to run it.

Each field is a flag of train.py. Imports nothing heavy.
"""
from dataclasses import dataclass, field
from pathlib import Path

import model_zoo
import optim
from common.flags import flag, names
from data.augmentation import AUGMENTATIONS
from data.dataset import ORDERS
from optim import schedules
from optim.schedules import Piecewise
from plan import values
from plan.allreduce import ALLREDUCES, parse_grid

THREADS = 2  # of an operation with --deterministic, which more threads on more workers would change


@dataclass(frozen=True)
class Recipe:
    """What to train. The same on any number of workers.

    data_dir: Dataset to train on: a folder that data.prepare wrote, or its address (s3://BUCKET/FOLDER), a folder of
        images (train/CLASS/* and val/CLASS/*), a built-in dataset (digits, glyphs, fashion), or synthetic:SAMPLES for
        random data that stays on the device.
    model: Model to train. ResNets are v1.5; names with _v1 are as first published. resnet50_nvcaffe and alexnet_bn*
        follow the LARS authors' files. resnet20, resnet10_narrow and convnet* are for small images. keras:NAME is a
        network of Keras. MODULE:FUNCTION is your own.
    pretrained: Start from the ImageNet weights of a keras:NAME model, which Keras downloads. The last layer is new.
    last_gamma: Initial gamma of the last batch norm of each residual branch of a ResNet: 0 (arXiv:1706.02677, section
        5.1) or 1 (as first published). Default: 0 for v1.5, 1 for the others.
    image_size: Input height and width in pixels. Accepts epoch:size pairs (progressive resizing), such as
        0:128,18:160,37:224. Default: the model's own.
    validation_size: Height and width of validation images in pixels. Default: the last of --image_size.
    epochs: Number of passes over the training set. Can be a fraction.
    batch_size: Global batch size (all workers), or epoch:size pairs such as 0:34816,30:69632.
    optimizer: Optimizer.
    learning_rate: Base learning rate. Accepts epoch:rate pairs, such as 0:29,30:50. Each rate applies from its epoch
        on.
    lr_scaling: Scaling of the learning rate with the batch size. linear: multiply it by the first batch size /
        --base_batch_size. sqrt: multiply it by the square root of that.
    base_batch_size: Batch size that --learning_rate was chosen for.
    lr_schedule: How the learning rate decays.
    poly_power: Exponent of --lr_schedule=poly.
    end_learning_rate: Learning rate at which --lr_schedule=poly or cosine ends.
    decay_from: Epoch from which the decay counts. start: epoch 0. warmup_end: the end of warm-up.
    lr_boundaries: Epochs at which --lr_schedule=multistep divides the learning rate by 10.
    warmup: Warm-up of the learning rate. gradual: rise linearly from --warmup_learning_rate to the learning rate.
        constant: stay at --warmup_learning_rate.
    warmup_epochs: Length of the warm-up in epochs.
    warmup_learning_rate: Learning rate at the start of a gradual warm-up, or during the whole of a constant warm-up.
    momentum: Momentum coefficient.
    momentum_correction: Multiply the momentum by the learning rate / the previous learning rate (arXiv:1706.02677,
        section 3.1), so that a changing rate applies to earlier gradients, too.
    nesterov: Nesterov momentum.
    momentum_schedule: How momentum depends on the batch size. noise_scale: 1 - (1 - momentum) * batch / 32768
        (arXiv:1811.05233, configuration B).
    weight_decay: Weight decay (L2 regularization).
    trust_coefficient: Trust coefficient of LARS.
    lars_epsilon: Term that is added to the denominator of the LARS trust ratio.
    lars_clip: Let the rate of a layer be the smaller of learning rate and trust ratio (Apex), not their product.
    clip_norm: Clip the global L2 norm of the gradients, without weight decay, to this. 0: off.
    exclude: Suffixes of the names of variables that get no weight decay and no trust ratio, such as gamma,beta,bias.
        --lars_exclude is an alias.
    label_smoothing: Label smoothing factor (arXiv:1512.00567, section 7).
    mixup: Alpha of mixup (arXiv:1710.09412): each pair of neighbouring images of a batch is blended with a weight from
        Beta(alpha, alpha). 0: off. With --cutmix, each pair takes one of the two.
    cutmix: Alpha of CutMix (arXiv:1905.04899): each pair of neighbouring images of a batch swaps a rectangle of random
        area. 0: off.
    ema_decay: Decay per update of an exponential moving average of the weights, such as 0.9999. The average is
        evaluated next to the weights. The decay belongs to the first phase's batch size: a batch that is n times as
        large uses decay ** n. 0: off.
    precision: Compute dtype of the forward and backward pass. mixed_float16 scales the loss. Variables and updates are
        float32.
    loss_scale: Loss scale of --precision=mixed_float16: dynamic, which skips updates that overflow, or a number, with
        which an overflow is a divergence.
    batch_norm_span: Batch-norm group size: number of samples over which batch norm computes its statistics (ghost batch
        norm below the micro-batch size, synchronized batch norm above it), on any number of workers. Accepts
        epoch:samples pairs, such as 0:16,30:32. auto, the default: the micro-batch size.
    batch_norm_momentum: Momentum of the moving mean and variance of batch norm, which move once per update of the
        weights.
    batch_norm_statistics: Batch-norm statistics for evaluation. moving: the moving averages. exact: statistics measured
        on training batches before each evaluation (arXiv:1811.05233, section 3.2).
    augmentation: Training augmentation. none: resize, centre crop. crop: mild random-resized crop. crop_flip_mild: the
        same with flip, of images stretched to squares, which validation sees whole. crop_flip: random-resized crop and
        flip (GoogLeNet). resnet: scale, crop, flip and colour (arXiv:1512.03385). caffe, alexnet: random crop and flip.
        nnabla: warp, brightness, contrast and noise of arXiv:1811.05233.
    order: Order of the samples. global: shuffled, the same on any number of workers. file: as DALI reads LMDB and
        RecordIO. This saves a copy of each sample, but the order within a file is fixed, and the number of workers
        changes the batches.
    shuffle_block: Number of consecutive samples that are read from one file before the next, if a TFRecord dataset has
        several. Smaller blocks shuffle better and open files more often.
    shuffle_group: Number of blocks whose samples are shuffled together. Each block is then a run of consecutive samples
        of a file. Data in a bucket needs it, such as 16. 0: the samples of a block are drawn from its whole file.
    evaluate_every: Number of epochs from one evaluation to the next. The last step is always followed by one.
    seed: Seed of the initial weights, the order of samples and the augmentation.
    """

    data_dir: str = flag("digits", path=True)
    model: str = flag("resnet20", model_zoo.MODELS, own=True)
    pretrained: bool = False
    last_gamma: float | None = flag(low=0.0, high=1.0)
    image_size: Piecewise | None = flag(parse=values.image_sizes)
    validation_size: int | None = flag(low=1, high=4096)
    epochs: float = flag(90.0, low=1e-9, high=1e5)
    batch_size: Piecewise = flag("256", parse=values.sizes)
    optimizer: str = flag("lars", optim.OPTIMIZERS)
    learning_rate: Piecewise = flag("5", parse=values.rates)
    lr_scaling: str = flag("none", schedules.SCALINGS)
    base_batch_size: int = flag(256, low=1)
    lr_schedule: str = flag("poly", schedules.DECAYS)
    poly_power: float = flag(2.0, low=0.0)
    end_learning_rate: float = flag(0.0, low=0.0)
    decay_from: str = flag("start", schedules.DECAY_CLOCKS)
    lr_boundaries: tuple[float, ...] = flag([], parse=values.ascending)
    warmup: str = flag("none", schedules.WARMUPS)
    warmup_epochs: float = flag(0.0, low=0.0)
    warmup_learning_rate: float = flag(0.0, low=0.0)
    momentum: float = flag(0.9, low=0.0, high=1.0)
    momentum_correction: bool = False
    nesterov: bool = False
    momentum_schedule: str = flag("constant", schedules.MOMENTUM_SCHEDULES)
    weight_decay: float = flag(0.0, low=0.0)
    trust_coefficient: float = flag(0.001, low=0.0)
    lars_epsilon: float = flag(0.0, low=0.0)
    lars_clip: bool = False
    clip_norm: float = flag(0.0, low=0.0)
    exclude: tuple[str, ...] = flag([], parse=tuple, alias="lars_exclude")
    label_smoothing: float = flag(0.0, low=0.0, high=1.0)
    mixup: float = flag(0.0, low=0.0, high=1e3)
    cutmix: float = flag(0.0, low=0.0, high=1e3)
    ema_decay: float = flag(0.0, low=0.0, high=1 - 1e-9)
    precision: str = flag("float32", ("float32", "mixed_float16", "mixed_bfloat16"))
    loss_scale: float | None = flag("dynamic", parse=values.loss_scale)
    batch_norm_span: Piecewise | None = flag(parse=values.span)
    batch_norm_momentum: float = flag(0.9, low=0.0, high=1.0)
    batch_norm_statistics: str = flag("moving", ("moving", "exact"))
    augmentation: str = flag("none", AUGMENTATIONS)
    order: str = flag(ORDERS[0], ORDERS)
    shuffle_block: int = flag(64, low=1)
    shuffle_group: int = flag(0, low=0)
    evaluate_every: int = flag(1, low=1)
    seed: int = flag(0, low=0, high=2**32 - 1)

    @property
    def final_image_size(self) -> int:
        """The image size of the last phase."""
        return self.image_size.values[-1]

    @property
    def validation_image_size(self) -> int:
        return self.validation_size or self.final_image_size


@dataclass(frozen=True)
class Launch:
    """What to train on: workers, their memory, devices and network.

    micro_batch_size: Number of samples that a worker processes at a time. Default: the largest divisor of batch size /
        workers that is at most 64.
    device: Device that trains the model. auto: GPUs if there are any. If nvidia-smi lists GPUs that TensorFlow cannot
        use, training stops with an error.
    dali_device: Device that decodes and augments the images. auto: the GPU if the model trains on one.
    dali_threads: Number of DALI threads per worker. Default: the number of cores that the worker may use.
    hw_decoder_load: Fraction of the images that the hardware JPEG decoder of a GPU decodes.
    mmap: Whether DALI maps the files of the dataset into memory. auto: unless they are on a network file system, where
        reading is faster.
    stage_dir: Folder on a local disk of each node. Before training, the dataset is copied there once per node, or with
        --stage_gb while it is read.
    stage_gb: GB that --stage_dir may hold on each node. Training then fetches what it reads next and keeps there what
        it reads again soonest.
    allreduce: All-reduce algorithm for the gradients. torus: 2D-torus all-reduce on a grid of workers
        (arXiv:1811.05233, section 2.2). hierarchical: reduce to one worker per node, ring over these, broadcast.
    torus_grid: Grid of --allreduce=torus, horizontal x vertical, such as 4x2. auto: the grid with the lowest latency.
    fusion_mb: Fusion buffer size in MB, before compression. Default: 32; for a ring, at most a quarter of all.
    compression: Compression of the gradients during the exchange.
    xla: What XLA compiles. true: the forward and backward pass as one unit, so the exchange of gradients cannot overlap
        it, and the update as another. auto: clusters of operations, but not the exchange.
    persistent_batch_norm: cuDNN's persistent batch norm on GPUs, in 16 bits. It spares transposes, but its integer sums
        may overflow for some data.
    deterministic: Reproduce the same weights, bit for bit, in every run, including resumed runs. true: also on other
        numbers of workers, if --micro_batch_size and --batch_norm_span are the same. same_workers: only on the same
        number of workers, with a quarter of the bytes in the exchange.
    workers_schedule: Number of workers from the start of each phase on, such as 0:3456,30:2048. Where it changes,
        training saves and exits with 75. The launch scripts continue it on the next number of workers.
    elastic: Continue when workers are lost or join. Needs horovodrun --min-np=N --max-np=N
        --host-discovery-script=SCRIPT, as `python -m distributed.gloo`.
    """

    micro_batch_size: int | None = flag(low=1)
    device: str = flag("auto", ("auto", "cpu", "gpu"))
    dali_device: str = flag("auto", ("auto", "cpu", "gpu"))
    dali_threads: int | None = flag(low=1)
    hw_decoder_load: float = flag(0.65, low=0.0, high=1.0)
    mmap: str = flag("auto", ("auto", "true", "false"), switch=True)
    stage_dir: str | None = flag(path=True)
    stage_gb: float | None = flag(low=1e-3)
    allreduce: str = flag("ring", ALLREDUCES)
    torus_grid: tuple[int, int] | None = flag("auto", parse=parse_grid)
    fusion_mb: float | None = flag(low=1e-3, high=1e5)
    compression: str = flag("none", ("none", "fp16"))
    xla: str = flag("false", ("false", "true", "auto"), switch=True)
    persistent_batch_norm: bool = True
    deterministic: str = flag("false", ("false", "true", "same_workers"), switch=True)
    workers_schedule: Piecewise | None = flag(None, parse=values.sizes)
    elastic: bool = False

    @property
    def is_deterministic(self) -> bool:
        return self.deterministic != "false"

    @property
    def sums_are_exact(self) -> bool:
        """Whether sums have the same bits on any number of workers. Compressed gradients do not."""
        return self.deterministic == "true" and self.compression == "none"

    @property
    def threads(self) -> int | None:
        """The number of threads of an operation on the CPU, or None if the number of cores decides."""
        return THREADS if self.sums_are_exact else None

    @property
    def device_policy(self) -> str:
        """The device argument of distributed.gpus.check: "any" if only the images are bound to the CPU."""
        return "any" if self.device == "auto" and self.dali_device == "cpu" else self.device


@dataclass(frozen=True)
class Run:
    """How to run it: where to write, when to save, what to do after a failure.

    mode: What to do. evaluate: evaluate the newest checkpoint in --checkpoint. export: write it as a SavedModel and as
        ONNX to --output_dir. predict: print the classes of --image.
    output_dir: Folder of the run. Default: a new folder in runs/. If it holds checkpoints, training resumes from them.
    checkpoint: Checkpoint for all modes except train: RUN/checkpoints, or one checkpoint in it.
    image: Image file, or folder of images, for --mode=predict. Can be given several times. Arguments that are not flags
        are further images.
    init_checkpoint: Checkpoint whose weights training starts from: RUN/checkpoints, or one checkpoint in it. The
        classes and the image size may differ. With other classes, the last layer is new.
    resume: Whether to resume. auto: resume from the newest checkpoint in --output_dir. never: delete the earlier run
        there and start over.
    checkpoint_every: Time between checkpoints: epochs (1, 0.5) or minutes (10m). auto: one epoch, at least one minute.
        The last step is always saved.
    target_top1: Validation top-1 to reach, such as 0.759, by the average of the weights with --ema_decay. summary.json
        says after how many epochs and seconds it was.
    stop_at_target: End training when --target_top1 is reached.
    on_divergence: What to do when the loss or a gradient becomes infinite or NaN, or the loss explodes. stop: end with
        an error. rollback: go back to the last good checkpoint and continue after the samples that caused it.
    max_rollbacks: Maximum number of rollbacks. The next divergence ends training with an error.
    log_trust_ratios: Record the weight norm, gradient norm and trust ratio of each layer once per epoch, in TensorBoard
        and the report.
    log_noise_scale: Measure the gradient noise scale (arXiv:1812.06162) between evaluations, and show it in the report:
        the batch size beyond which larger batches save few updates. Needs at least two micro-batches per update.
    save_augmentations: Write augmentations.png to the run's folder: training images as the model sees them.
    timeline: File for Horovod's timeline of the gradient exchange, which chrome://tracing can show.
    profile: Steps to profile, as FROM:TO (exclusive), such as 100:110. TensorBoard's profile plugin shows the result.
    observer: Observer of your own, as MODULE:NAME. It sees what the run's folder records. Can be given several times.
    dry_run: Print the plan as JSON and exit.
    workers: Number of workers to plan for. Only with --dry_run.
    workers_per_node: Number of workers per node to plan for. Only with --dry_run. Default: the number per node of this
        launch, or 4 with --workers, as in arXiv:1811.05233.
    train_samples: Number of training samples that --dry_run plans for, so that it does not need the dataset. Training
        ignores it and counts the samples of its dataset.
    """

    mode: str = flag("train", ("train", "evaluate", "export", "predict"))
    output_dir: str | None = flag(path=True)
    checkpoint: str | None = flag(path=True)
    image: tuple[str, ...] = flag([], parse=tuple, repeated=True, path=True)
    init_checkpoint: str | None = flag(path=True)
    resume: str = flag("auto", ("auto", "never"))
    checkpoint_every: values.Every = flag("auto", parse=values.Every.parse)
    target_top1: float | None = flag(parse=values.fraction)
    stop_at_target: bool = False
    on_divergence: str = flag("stop", ("stop", "rollback"))
    max_rollbacks: int = flag(3, low=0)
    log_trust_ratios: bool = False
    log_noise_scale: bool = False
    save_augmentations: bool = False
    timeline: str | None = flag(path=True)
    profile: tuple[int, int] | None = flag(parse=values.range_of_steps)
    observer: tuple[str, ...] = flag([], parse=values.names_in_modules, repeated=True)
    dry_run: bool = False
    workers: int | None = flag(low=1)
    workers_per_node: int | None = flag(low=1)
    train_samples: int | None = flag(low=1)


@dataclass(frozen=True)
class Settings:
    """A whole command line.

    given: value of each flag before parsing. text: content of flags.txt, which reproduces the run. source: the default
    recipe, if it was read. fitted: flags that fit it to the dataset. recipe_file: the recipe that was read: the default
    one, or the first file of --flagfile. without_effect: a sentence for each flag on the command line that has none.
    origins: flag -> "command line" or "recipe", for the flags in `text` that are not at their defaults.
    """

    recipe: Recipe
    launch: Launch
    run: Run
    given: dict[str, object]
    text: str
    source: Path | None = None
    fitted: tuple[str, ...] = ()
    recipe_file: Path | None = None
    without_effect: tuple[str, ...] = ()
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def default_recipe(self) -> list[str]:
        """The flags with which a command line would read the recipe that was read by default."""
        return [f"--flagfile={self.source}", *self.fitted] if self.source else []

    @property
    def trains(self) -> bool:
        return self.run.mode == "train" and not self.run.dry_run

    @property
    def has_initial_weights(self) -> bool:
        """Whether training starts from trained weights."""
        return bool(self.run.init_checkpoint) or self.recipe.pretrained

    @property
    def flags(self) -> dict:
        """Every flag's value, as it was given. It has to be the same on all ranks."""
        return {f"--{name}": value for name, value in self.given.items()}

    @property
    def identity(self) -> dict:
        """The flags that identify a training: those of the recipe, except the data folder, which may move."""
        return {name: self.given[name] for name in names(Recipe) if name != "data_dir"}

