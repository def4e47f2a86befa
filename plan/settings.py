"""Every setting of a training, typed, with its default and its help: what to train, on what, and how to run it.

Each field is a flag of train.py. common.flags.flag describes its options; these are read in this folder alone:

    screen      heading under which `train.py --help` lists the flag; without it, only --helpfull does
    used_with   other flag -> its values: the flag has an effect only if each of them has one of these values
    modes       values of --mode with which the flag may be given; without it, all
    recorded    whether flags.txt has this flag of Run, because it changes weights or what checkpoints contain;
                flags.txt always has the flags of Recipe and Launch

Imports nothing heavy.
"""
from dataclasses import dataclass, field
from pathlib import Path

import model_zoo
import optim
from common.flags import flag, names
from data.augmentation import AUGMENTATIONS
from data.dataset import ORDERS
from data.rand_augment import RandAugment
from data.set_aside import FRACTION
from optim import schedules
from optim.schedules import Piecewise
from plan import values
from plan.allreduce import ALLREDUCES, parse_grid
from plan.expected import Expected

RESIDUAL = [name for name, info in model_zoo.MODELS.items() if info.is_residual]
THREADS = 2  # of an operation with --deterministic, which more threads on more workers would change
TRAINING = {"mode": ("train",)}  # the conditions of flags that only a training reads
WHOLE = {"freeze": (False,)}  # and of those that only layers before the last one follow


@dataclass(frozen=True)
class Recipe:
    """What to train. The same on any number of workers."""

    data_dir: str = flag("digits", "Dataset: a folder of data.prepare, or its address (s3://BUCKET/FOLDER), images "
        "(CLASS/*; train/CLASS/*, val/CLASS/*), labels.csv, digits, fashion, cifar10, synthetic:SAMPLES.",
        path=True, screen="Data and model")
    model: str = flag("resnet20", "Model to train. ResNets are v1.5, and *_v1 as first published. resnet50_nvcaffe and "
        "alexnet_bn* follow the LARS authors' files. resnet20, resnet10_narrow and *convnet* are for small images. "
        "keras:NAME: Keras's. MODULE:FUNCTION: your own.", model_zoo.MODELS, own=True, screen="Data and model")
    pretrained: bool = flag(False, "Start from the ImageNet weights of a keras:NAME model, which Keras downloads. The "
        "last layer is new.")
    pretrained_weights: str | None = flag(None, "Start from the weights of a keras:NAME model in this .h5 file of "
        "Keras, or in a model around it. The last layer is new.", path=True)
    freeze: bool = flag(False, "Train the last layer alone. The others keep their weights, and run as in evaluation, "
        "so that a step costs little more than a forward pass. Start from trained weights, and train all layers from "
        "there with --init_checkpoint.")
    last_gamma: float | None = flag(None, "Initial gamma of the last batch norm of each residual branch of a ResNet: 0 "
        "(arXiv:1706.02677, section 5.1) or 1 (as first published). Default: 0 for v1.5, 1 for the others.",
        low=0.0, high=1.0, used_with={"model": RESIDUAL})
    drop_path: float = flag(0.0, "Stochastic depth: probability that a training sample skips a ResNet's last block. It "
        "is 0 for the first, and linear in between.", low=0.0, high=0.99,
        used_with={"model": RESIDUAL, **WHOLE})
    image_size: Piecewise | None = flag(None, "Input height and width in pixels. Accepts epoch:size pairs (progressive "
        "resizing), such as 0:128,18:160,37:224. Default: the model's own.", parse=values.image_sizes,
        screen="Data and model")
    validation_size: int | None = flag(None, "Height and width of validation images in pixels. Default: the last of "
        "--image_size.", low=1, high=4096)
    validation_fraction: float = flag(float(FRACTION), "Fraction of each class that is set aside for validation if "
        "--data_dir is a folder of classes (CLASS/*) without validation images. A hash of each file's path chooses "
        "them, and not --seed. (--validation_size is in pixels. The flag of data.prepare is 0 by default.)",
        low=0.001, high=0.9, modes=("train",))
    label_column: str | None = flag(None, "Column with the classes, such as species, if --data_dir is a table. "
        "Default: label or class.", parse=str.strip)
    epochs: float = flag(90.0, "Number of passes over the training set. Can be a fraction.", low=1e-9, high=1e5,
        screen="Training")
    batch_size: Piecewise = flag("256", "Global batch size (all workers), or epoch:size pairs such as "
        "0:34816,30:69632.", parse=values.sizes, screen="Training")
    optimizer: str = flag("lars", "Optimizer.", optim.OPTIMIZERS, screen="Training")
    learning_rate: Piecewise = flag("5", "Base learning rate. Accepts epoch:rate pairs, such as 0:29,30:50. Each rate "
        "applies from its epoch on.", parse=values.rates, screen="Training")
    lr_scaling: str = flag("none", "Scaling of the learning rate with the batch size. linear: multiply it by the first "
        "batch size / --base_batch_size. sqrt: by the square root of that.", schedules.SCALINGS)
    base_batch_size: int = flag(256, "Batch size that --learning_rate was chosen for.", low=1,
        used_with={"lr_scaling": ("linear", "sqrt")})
    lr_schedule: str = flag("poly", "How the learning rate decays.", schedules.DECAYS)
    poly_power: float = flag(2.0, "Exponent of --lr_schedule=poly.", low=0.0, used_with={"lr_schedule": ("poly",)})
    end_learning_rate: float = flag(0.0, "Learning rate at which --lr_schedule=poly or cosine ends.", low=0.0,
        used_with={"lr_schedule": schedules.ENDING})
    decay_from: str = flag("start", "Epoch from which the decay counts. start: epoch 0. warmup_end: the end of "
        "warm-up.", schedules.DECAY_CLOCKS, used_with={"lr_schedule": schedules.ENDING})
    lr_boundaries: tuple[float, ...] = flag([], "Epochs at which --lr_schedule=multistep divides the learning rate by "
        "10.", parse=values.ascending, used_with={"lr_schedule": ("multistep",)})
    warmup: str = flag("none", "Warm-up of the learning rate. gradual: rise linearly from --warmup_learning_rate to "
        "the learning rate. constant: stay at --warmup_learning_rate.", schedules.WARMUPS)
    warmup_epochs: float = flag(0.0, "Length of the warm-up in epochs.", low=0.0,
        used_with={"warmup": ("gradual", "constant")})
    warmup_learning_rate: float = flag(0.0, "Learning rate at the start of a gradual warm-up, or during a constant "
        "one.", low=0.0, used_with={"warmup": ("gradual", "constant")})
    momentum: float = flag(0.9, "Momentum coefficient.", low=0.0, high=1.0,
        used_with={"optimizer": optim.with_option("momentum")})
    momentum_correction: bool = flag(False, "Multiply the momentum by the learning rate / the previous learning rate "
        "(arXiv:1706.02677, section 3.1), so that a changing rate applies to earlier gradients, too.",
        used_with={"optimizer": optim.with_option("nesterov")})  # with Muon, it does so anyway
    nesterov: bool = flag(False, "Nesterov momentum.", used_with={"optimizer": optim.with_option("nesterov")})
    momentum_schedule: str = flag("constant", "How momentum depends on the batch size. noise_scale: 1 - (1 - momentum) "
        "* batch / 32768 (arXiv:1811.05233, configuration B).", schedules.MOMENTUM_SCHEDULES,
        used_with={"optimizer": optim.with_option("momentum")})
    weight_decay: float = flag(0.0, "Weight decay (L2 regularization).", low=0.0, screen="Training",
        used_with={"optimizer": optim.with_option("weight_decay")})
    trust_coefficient: float = flag(0.001, "Trust coefficient of LARS.", low=0.0,
        used_with={"optimizer": optim.with_option("trust_coefficient")})
    lars_epsilon: float = flag(0.0, "Term that is added to the denominator of the LARS trust ratio.", low=0.0,
        used_with={"optimizer": optim.with_option("epsilon")})
    lars_clip: bool = flag(False, "Let the rate of a layer be the smaller of learning rate and trust ratio (Apex), not "
        "their product.", used_with={"optimizer": optim.with_option("clip")})
    clip_norm: float = flag(0.0, "Clip the global L2 norm of the gradients, without weight decay, to this. 0: off.",
        low=0.0)
    exclude: tuple[str, ...] = flag([], "Suffixes of names of variables without weight decay and trust ratio, "
        "such as gamma,beta,bias. With muon, kernels among them are updated by AdamW. --lars_exclude is an alias.",
        parse=tuple, alias="lars_exclude",
        used_with={"optimizer": optim.with_option("exclude")})
    loss: str = flag("cross_entropy", "Training loss. binary_cross_entropy: mean over the classes, of which each with "
        "a share of a mixed image above 0.2 is a target (arXiv:2110.00476).",
        ("cross_entropy", "binary_cross_entropy"))
    label_smoothing: float = flag(0.0, "Label smoothing factor (arXiv:1512.00567, section 7).", low=0.0, high=1.0)
    class_weights: float = flag("none", "Weights of the classes in the training loss. balanced: the inverse of their "
        "number of training images. A power from 0 to 1: images ** -power. Their mean over the training images is 1. "
        "train_loss is weighted, val_loss is not.", parse=values.class_weights)
    mixup: float = flag(0.0, "Alpha of mixup (arXiv:1710.09412): pairs of neighbouring images are blended "
        "with a weight from Beta(alpha, alpha). 0: off. With --cutmix, each pair takes one of the two.",
        low=0.0, high=1e3)
    cutmix: float = flag(0.0, "Alpha of CutMix (arXiv:1905.04899): pairs of neighbouring images swap a rectangle "
        "of random area. 0: off.", low=0.0, high=1e3)
    ema_decay: float = flag(0.0, "Decay per update of an exponential moving average of the weights, such as 0.9999, "
        "at the first phase's batch size. A batch n times as large uses decay ** n. 0: off.", low=0.0, high=1 - 1e-9)
    precision: str = flag("float32", "Compute dtype of the forward and backward pass. mixed_float16 scales the loss. "
        "Variables and updates are float32.", ("float32", "mixed_float16", "mixed_bfloat16"), screen="Training")
    loss_scale: float | None = flag("dynamic", "Loss scale of --precision=mixed_float16: dynamic, which skips updates "
        "that overflow, or a number, with which an overflow is a divergence.", parse=values.loss_scale,
        used_with={"precision": ("mixed_float16",)})
    batch_norm_span: Piecewise | None = flag(None, "Batch-norm group size in samples, on any number of workers (ghost "
        "batch norm below the micro-batch size, synchronized batch norm above it). Accepts epoch:samples pairs, such "
        "as 0:16,30:32. auto, the default: the micro-batch size.", parse=values.span, used_with=WHOLE)
    batch_norm_momentum: float = flag(0.9, "Momentum of batch norm's moving mean and variance, which move once "
        "per update.", low=0.0, high=1.0, used_with=WHOLE)
    batch_norm_statistics: str = flag("moving", "Batch-norm statistics for evaluation. moving: the moving averages. "
        "exact: statistics measured on training batches before each evaluation (arXiv:1811.05233, section 3.2).",
        ("moving", "exact"), used_with=WHOLE)
    augmentation: str = flag("none", "Training augmentation. none: resize, centre crop. crop: mild random-resized "
        "crop. crop_flip_mild: the same with flip, of whole images stretched to squares. crop_flip: random-resized "
        "crop and flip (GoogLeNet). crop_flip_95: the same, but validation sees 95 %. resnet: scale, crop, flip and "
        "colour. caffe, alexnet: random crop and flip. pad_crop_flip: the same of padded images (arXiv:1512.03385). "
        "reflect_crop_alternate_flip: airbench's. nnabla: warp, brightness, contrast and noise of arXiv:1811.05233. "
        "MODULE:NAME is your own.", AUGMENTATIONS, own=True, screen="Data and model")
    rand_augment: RandAugment | None = flag("none", "RandAugment after --augmentation, in timm's notation, such as "
        "m6-n2-mstd0.5-inc1.", parse=RandAugment.parse)
    repeats: int = flag(1, "Repeated augmentation (arXiv:1902.05509): how often an epoch takes an image, each time "
        "with its own random augmentation. With 3, an epoch has a third of the images, and as many samples.", low=1)
    order: str = flag(ORDERS[0], "Order of the samples. global: shuffled, the same on any number of workers. file: as "
        "DALI reads LMDB and RecordIO. This saves a copy of each sample, but the order within a file is fixed, and the "
        "number of workers changes the batches.", ORDERS)
    shuffle_block: int = flag(64, "Number of consecutive samples read from one file of a TFRecord dataset before the "
        "next. Smaller blocks shuffle better and open files more often.", low=1)
    shuffle_group: int = flag(0, "Number of blocks, of consecutive samples of a file, that are shuffled together. Data "
        "in a bucket needs it, such as 16. 0: a block's samples are drawn from its whole file.", low=0)
    evaluation_views: int = flag("1", "Views of each validation image, whose logits are averaged, for the views_val_* "
        "figures next to val_*, and for prediction and export. 2: the image and its mirror image. 6: also both shifted "
        "by one pixel in two directions (arXiv:2404.00498).", ("1", "2", "6"), parse=int)
    evaluate_every: int = flag(1, "Number of epochs from one evaluation to the next. The last step is always followed "
        "by one.", low=1)
    seed: int = flag(0, "Seed of the initial weights, the order of samples and the augmentation.",
        low=0, high=2**32 - 1)

    @property
    def is_pretrained(self) -> bool:
        """Whether a network of Keras starts from weights in a file of Keras."""
        return self.pretrained or bool(self.pretrained_weights)

    @property
    def final_image_size(self) -> int:
        """The image size of the last phase."""
        return self.image_size.values[-1]

    @property
    def validation_image_size(self) -> int:
        return self.validation_size or self.final_image_size


@dataclass(frozen=True)
class Launch:
    """What to train on: workers, their memory, devices and network."""

    micro_batch_size: int | None = flag(None, "Number of samples that a worker processes at a time. Default: the "
        "largest divisor of batch size / workers that is at most 64.", low=1, screen="Device")
    device: str = flag("auto", "Device that trains the model. auto: GPUs if there are any. If nvidia-smi lists GPUs "
        "that TensorFlow cannot use, or fails, training stops with an error.", ("auto", "cpu", "gpu"), screen="Device")
    dali_device: str = flag("auto", "Device that decodes and augments the images. auto: the GPU if the model trains on "
        "one.", ("auto", "cpu", "gpu"))
    dali_threads: int | None = flag(None, "Number of DALI threads per worker. Default: the number of cores of the "
        "worker.", low=1)
    hw_decoder_load: float = flag(0.65, "Fraction of the images that the hardware JPEG decoder of a GPU decodes.",
        low=0.0, high=1.0)
    mmap: str = flag("auto", "Whether DALI maps the files of the dataset into memory. auto: unless they are on a "
        "network file system, where reading is faster.", ("auto", "true", "false"), switch=True)
    stage_dir: str | None = flag(None, "Folder on a local disk of each node. Before training, the dataset is copied "
        "there once per node, or with --stage_gb while it is read.", path=True, written=True)
    stage_gb: float | None = flag(None, "GB of a dataset that --stage_dir may hold on each node. Training then "
        "fetches what it reads next and keeps there what it reads again soonest.", low=1e-3)
    allreduce: str = flag("ring", "All-reduce algorithm for the gradients. torus: 2D-torus all-reduce on a grid of "
        "workers (arXiv:1811.05233, section 2.2). hierarchical: reduce to one worker per node, ring over these, "
        "broadcast.", ALLREDUCES)
    torus_grid: tuple[int, int] | None = flag("auto", "Grid of --allreduce=torus, horizontal x vertical, such as 4x2. "
        "auto: the grid with the lowest latency.", parse=parse_grid, used_with={"allreduce": ("torus",)})
    fusion_mb: float | None = flag(None, "Fusion buffer size in MB, before compression. Default: 32; for a ring, at "
        "most a quarter of all.", low=1e-3, high=1e5)
    compression: str = flag("none", "Compression of the gradients during the exchange.", ("none", "fp16"))
    share_orthogonalization: str = flag("auto", "Whether each worker orthogonalizes a part of the kernels for "
        "--optimizer=muon, and the results are exchanged, as many bytes again as the gradients. auto: if all workers "
        "are on one node or their processors differ, and without --xla=true.", ("auto", "true", "false"), switch=True,
        used_with={"optimizer": [name for name, info in optim.OPTIMIZERS.items() if info.shares_matrices]})
    xla: str = flag("false", "What XLA compiles. true: the forward and backward pass as one unit, so the exchange of "
        "gradients cannot overlap it, and the update as another. auto: clusters of operations, but not the exchange.",
        ("false", "true", "auto"), switch=True)
    persistent_batch_norm: bool = flag(True, "cuDNN's persistent batch norm on GPUs, in 16 bits. It spares transposes, "
        "but its integer sums may overflow for some data.",
        used_with={"precision": ("mixed_float16", "mixed_bfloat16"), **WHOLE})
    deterministic: str = flag("false", "Reproduce the same weights, bit for bit, in every run, also a resumed one. "
        "true: also on other numbers of workers, with the same --micro_batch_size and --batch_norm_span. "
        "same_workers: only on the same number, with a quarter of the bytes in the exchange.",
        ("false", "true", "same_workers"), switch=True)
    workers_schedule: Piecewise | None = flag(None, "Number of workers from the start of each phase on, such as "
        "0:3456,30:2048. Where it changes, training saves and exits with 75, and the launch scripts continue it.",
        parse=values.sizes)
    elastic: bool = flag(False, "Continue when workers are lost or join. Needs horovodrun --min-np=N --max-np=N "
        "--host-discovery-script=SCRIPT, as `python -m distributed.gloo`.")

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
    """How to run it: where to write, when to save, what to do after a failure."""

    mode: str = flag("train", "What to do. evaluate: --checkpoint on --data_dir. export: as SavedModel, "
        "ONNX and .h5 to --output_dir. predict: the classes of --image.",
        ("train", "evaluate", "export", "predict"), screen="Run")
    output_dir: str | None = flag(None, "Folder of the run. Default: a new folder in runs/. If it holds checkpoints, "
        "training resumes from them. With --mode=evaluate, export or predict: where the results go.", path=True,
        written=True, screen="Run")
    checkpoint: str | None = flag(None, "Checkpoint for all modes except train: RUN/checkpoints/best or "
        "RUN/checkpoints (newest).", path=True, screen="Run",
        used_with={"mode": ("evaluate", "export", "predict")})
    image: tuple[str, ...] = flag([], "Image file, or folder of images, for --mode=predict. Can be given several "
        "times. Arguments that are not flags are further images.", parse=tuple, repeated=True, path=True,
        modes=("predict",))
    tflite: str = flag("false", "Whether --mode=export also writes model.tflite, for phones and small computers. true: "
        "in float32. dynamic_range: weights of 8 bits, for a quarter of the size.", ("false", "true", "dynamic_range"),
        switch=True, modes=("export",))
    init_checkpoint: str | None = flag(None, "Checkpoint whose weights training starts from: RUN/checkpoints/best, "
        "RUN/checkpoints (the newest), or another one in it. The classes and the image size may differ. With other "
        "classes, the last layer is new.", path=True, modes=("train",), recorded=True)
    resume: str = flag("auto", "Whether to resume. auto: resume from the newest checkpoint in --output_dir. never: "
        "delete the earlier run there and start over.", ("auto", "never"), screen="Run", used_with=TRAINING)
    checkpoint_every: values.Every = flag("auto", "Time between checkpoints: epochs (1, 0.5) or minutes (10m). auto: "
        "one epoch, at least one minute. The last step and the best evaluation are always saved.",
        parse=values.Every.parse, screen="Run", used_with=TRAINING)
    target_top1: float | None = flag(None, "Validation top-1 to reach, such as 0.759, by the average of the weights "
        "with --ema_decay. summary.json has the epochs and seconds until then.", parse=values.fraction, recorded=True,
        used_with=TRAINING)
    stop_at_target: bool = flag(False, "End training when --target_top1 is reached.", recorded=True, used_with=TRAINING)
    patience: int | None = flag(None, "End training after so many evaluations without a better validation top-1, by "
        "the average of the weights with --ema_decay.", low=1, recorded=True, used_with=TRAINING)
    expect: Expected | None = flag(None, "File with the validation top-1 to expect over the epochs: metrics.jsonl of "
        "another run, or lines 'epoch top1'. Each evaluation says how many points it lies above or below.",
        parse=Expected.read, path=True, used_with=TRAINING)
    stop_below_expected: float | None = flag(None, "End training with an error when an evaluation lies more than so "
        "many percentage points below --expect.", low=0.0, high=100.0, used_with=TRAINING)
    on_divergence: str = flag("stop", "What to do when the loss or a gradient becomes infinite or NaN, or the loss "
        "explodes. stop: end with an error. rollback: go back to the last good checkpoint and continue after the "
        "samples that caused it.", ("stop", "rollback"), recorded=True, used_with=TRAINING)
    max_rollbacks: int = flag(3, "Maximum number of rollbacks. The next divergence ends training with an error.", low=0,
        used_with={"on_divergence": ("rollback",), **TRAINING}, recorded=True)
    log_trust_ratios: bool = flag(False, "Record the weight norm and gradient norm of each layer, and with LARS its "
        "trust ratio, once per epoch, in TensorBoard and the report.", recorded=True, used_with=TRAINING)
    log_noise_scale: bool = flag(False, "Measure the gradient noise scale (arXiv:1812.06162) for the report: the batch "
        "size beyond which larger batches save few updates. Needs at least two micro-batches per update.",
        recorded=True, used_with=TRAINING)
    save_augmentations: bool = flag(False, "Write augmentations.png to the run's folder: training images as the model "
        "sees them.", used_with=TRAINING)
    timeline: str | None = flag(None, "File for Horovod's timeline of the gradient exchange, which chrome://tracing "
        "can show.", path=True, written=True)
    profile: tuple[int, int] | None = flag(None, "Steps to profile, as FROM:TO (exclusive), such as 100:110. "
        "TensorBoard's profile plugin shows the result.", parse=values.range_of_steps, used_with=TRAINING)
    observer: tuple[str, ...] = flag([], "Observer of your own, as MODULE:NAME. It sees what the run's folder records. "
        "Can be given several times.", parse=values.names_in_modules, repeated=True, used_with=TRAINING)
    dry_run: bool = flag(False, "Print the plan and exit: a summary in a terminal, JSON in a pipe or file.",
        screen="Run")
    workers: int | None = flag(None, "Number of workers to plan for. Only with --dry_run.", low=1)
    workers_per_node: int | None = flag(None, "Number of workers per node to plan for. Only with --dry_run. Default: "
        "the number per node of this launch, or 4 with --workers, as in arXiv:1811.05233.", low=1)
    train_samples: int | None = flag(None, "Number of training samples for which --dry_run plans without the dataset. "
        "Training counts those of its dataset.", low=1, used_with={"dry_run": (True,)})


@dataclass(frozen=True)
class Source:
    """The recipe that a command line has read, and which flags it takes from there."""

    file: Path | None = None  # the default recipe, or the first file of --flagfile
    is_default: bool = False  # whether no recipe was named, so that this one was chosen
    fitted: tuple[str, ...] = ()  # flags that fit a default recipe to the dataset, such as --batch_size=8
    recipe: Recipe = field(default_factory=Recipe)  # without the flags of the command line
    origins: dict[str, str] = field(default_factory=dict)  # flag -> "command line" or "recipe"; defaults are left out

    @property
    def words(self) -> list[str]:
        """The flags with which a command line would read the recipe that was chosen by default."""
        return [f"--flagfile={self.file}", *self.fitted] if self.is_default else []


@dataclass(frozen=True)
class Settings:
    """A whole command line."""

    recipe: Recipe
    launch: Launch
    run: Run
    given: dict[str, object]  # value of each flag, from wherever it comes, before its `parse` function
    text: str  # content of flags.txt, which reproduces the run
    source: Source = field(default_factory=Source)
    without_effect: tuple[str, ...] = ()  # a sentence for each flag on the command line that has no effect

    def is_given(self, name: str) -> bool:
        """Whether a recorded flag is on the command line."""
        return self.source.origins.get(name) == "command line"

    @property
    def trains(self) -> bool:
        return self.run.mode == "train" and not self.run.dry_run

    @property
    def has_initial_weights(self) -> bool:
        """Whether training starts from trained weights."""
        return bool(self.run.init_checkpoint) or self.recipe.is_pretrained

    @property
    def flags(self) -> dict:
        """Every flag's value, as it was given. It has to be the same on all ranks."""
        return {f"--{name}": value for name, value in self.given.items()}

    @property
    def identity(self) -> dict:
        """The flags that identify a training: those of the recipe, except paths, whose files may move."""
        return {name: self.given[name] for name in names(Recipe) if name not in ("data_dir", "pretrained_weights")}

