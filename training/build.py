"""Builds the parts of a training from its settings: feed, model, optimizer, compiled steps."""
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import model_zoo
import optim
from common.errors import UserError
from data.augmentation import AUGMENTATIONS
from data.balance import train_counts
from data.dataset import Dataset
from data.feed import Feed
from data.mixing import Mixing
from data.pipeline import DecoderSettings
from data.staging.stage import Staging
from data.staging.stage import stage_dataset as staged
from data.synthetic import SyntheticFeed
from distributed import optimizer as distributed
from distributed import world as worlds
from distributed.exchange import GradientExchange, make_collectives
from distributed.world import World
from model_zoo.layers import trained_variables
from optim.average import WeightAverage
from optim.muon import Share
from plan.allreduce import AllreducePlan
from plan.plan import LARGEST_MICRO_BATCH, Phase, Plan
from plan.settings import Launch, Recipe, Settings
from training.bad_input import without_damaged
from training.batch_norm import ExactStatistics, MovingStatistics, Span
from training.clock import batch_counts
from training.divergence import divergence_reason
from training.evaluate import Evaluator
from training.losses import balancing_weights, loss_of_guessing, make_loss
from training.noise_scale import NoiseScale
from training.state import State
from training.step import StepParts, make_train_step

PERSISTENT = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"  # batch norm of 16 bits and channels last needs no transpose
DIFFERENT_FLAGS = "the workers were started with different flags"


@dataclass(frozen=True)
class Setup:
    """A training on the current workers."""

    settings: Settings
    plan: Plan
    world: World
    feed: Feed | SyntheticFeed
    state: State
    evaluate: Evaluator
    exact: ExactStatistics | None  # measures batch norm's statistics before an evaluation
    train_step: Callable  # returns the compiled step of a phase, as make_train_step does
    divergence: Callable  # returns what is wrong with the loss and the gradient norms of an update, or None

    def layers(self) -> dict:
        """Returns the statistics of each layer at the last update, if they are logged."""
        return self.state.layers.collect() if self.state.layers else {}


def set_variables(settings: Settings) -> None:
    """Sets the variables that TensorFlow reads once, at the first operation, for --xla=auto and batch norm."""
    if settings.recipe.precision != "float32":
        os.environ[PERSISTENT] = str(int(settings.launch.persistent_batch_norm))
    if settings.launch.xla == "auto":
        os.environ["TF_XLA_FLAGS"] = f"{os.environ.get('TF_XLA_FLAGS', '')} --tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"


def start_and_check_flags(settings: Settings) -> World:
    """Starts Horovod without a gradient exchange. Raises UserError unless all ranks have the same flags."""
    launch, timeline = settings.launch, settings.run.timeline
    set_variables(settings)
    world = worlds.start(settings.recipe.seed, launch.is_deterministic, timeline=timeline, device=launch.device,
                         threads=launch.threads)
    world.agree(settings.flags, DIFFERENT_FLAGS)
    worlds.check_gpus(world, launch.device_policy)
    return world


def make_setup(settings: Settings, plan: Plan, world: World, feed, state: State, exchange: GradientExchange,
               class_weights: np.ndarray | None = None) -> Setup:
    """Builds a training from its parts. class_weights: as training.losses.make_loss takes them."""
    recipe = settings.recipe
    batch_counts().restart()
    exchange.scales = state.exchange_scales
    if optim.OPTIMIZERS[recipe.optimizer].shares_matrices:
        distributed.inner(state.optimizer).share = (
            Share(world.rank, world.size, exchange.gathered) if plan.shares_orthogonalization else None)
    exact = ExactStatistics(state.model, world) if recipe.batch_norm_statistics == "exact" else None

    @functools.cache
    def train_step(phase: Phase):
        def update_average():
            state.write_statistics()  # which the average follows, too
            state.average.update(phase.global_batch_size)

        own = phase.micro_batches_of(world.rank, world.size)
        return make_train_step(StepParts(
            state.model, state.optimizer, exchange, state.totals, own=own, micro_batches=phase.micro_batches,
            exact=settings.launch.sums_are_exact, loss=make_loss(recipe.loss, recipe.label_smoothing, class_weights),
            clip_norm=recipe.clip_norm, freeze=recipe.freeze, xla=settings.launch.xla == "true", moving=state.moving,
            layers=state.layers, span=Span.of(phase, world.size), after_update=state.average and update_average,
            measures_noise=settings.run.log_noise_scale))

    evaluate = make_evaluator(settings, state.model, feed, world, state.average)
    divergence = functools.partial(
        divergence_reason, names=[v.name.split(":")[0] for v in state.trained],
        guessing=loss_of_guessing(recipe.loss, len(feed.dataset.classes), class_weights),
        loss_scaling=distributed.has_dynamic_scale(state.optimizer))
    return Setup(settings, plan=plan, world=world, feed=feed, state=state, evaluate=evaluate, exact=exact,
                 train_step=train_step, divergence=divergence)


def share_dataset(dataset: Dataset, world: World) -> Dataset:
    """Returns the dataset with its indexes, which rank 0 reads for all workers. Raises UserError on all ranks.

    The folder stays this worker's own: a built-in dataset is in each node's cache.
    """
    shared = on_rank_0(world, dataset.with_indexes).moved_to(dataset.folder)
    return without_damaged(shared, world) if shared.format == "folder" else shared


def stage_dataset(dataset: Dataset, recipe: Recipe, launch: Launch, world: World) -> Dataset:
    """Returns the dataset as this node's workers read it (data.staging.stage). Raises UserError on all ranks."""
    staging = Staging(launch.stage_dir, launch.stage_gb, order=recipe.order, block=recipe.shuffle_block,
                      group=recipe.shuffle_group, seed=recipe.seed, repeats=recipe.repeats)
    workers = max(1, world.workers_per_node())
    with world.raise_on_all_ranks():
        return staged(dataset, staging, workers, functools.partial(on_rank_0, world))


def on_rank_0(world: World, action: Callable[[], Any]) -> Any:
    """Returns on all ranks what `action` returns on rank 0. Raises its UserError and OSError on all ranks."""
    with world.raise_on_all_ranks():
        result = action() if world.rank == 0 else None
    return world.broadcast(result, "rank 0's result")


def weights_of_classes(recipe: Recipe, dataset: Dataset, world: World) -> np.ndarray | None:
    """Returns the weights of --class_weights, float32 (classes,), or None. Raises UserError on all ranks."""
    if not recipe.class_weights:
        return None
    return on_rank_0(world, lambda: balancing_weights(train_counts(dataset), recipe.class_weights))


def make_feed(recipe: Recipe, launch: Launch, dataset: Dataset, world: World) -> Feed | SyntheticFeed:
    """Creates the feed that reads this worker's shard of a dataset."""
    name = dali_device(launch.dali_device, world)
    mixing = Mixing(recipe.mixup, recipe.cutmix)
    if dataset.is_synthetic:
        return SyntheticFeed(dataset, image_size=recipe.validation_image_size, seed=recipe.seed, shard=world.rank,
                             shards=world.size, mixing=mixing)
    device = DecoderSettings(
        name, number=world.gpu if name == "gpu" else None, threads=launch.dali_threads or world.cores,
        hw_decoder_load=launch.hw_decoder_load, mmap=launch.mmap,
        upload="/gpu:0" if name == "cpu" and world.gpu is not None else None)
    augmentation = AUGMENTATIONS[recipe.augmentation]
    if recipe.rand_augment:
        augmentation = augmentation.followed_by(recipe.rand_augment)
    return Feed(dataset.in_order(recipe.order), image_size=recipe.validation_image_size, augmentation=augmentation,
                seed=recipe.seed, shard=world.rank, shards=world.size, device=device, mixing=mixing,
                shuffle_block=recipe.shuffle_block, shuffle_group=recipe.shuffle_group, repeats=recipe.repeats)


def dali_device(flag: str, world: World) -> str:
    """Returns "cpu" or "gpu" for --dali_device. Raises UserError if there is no GPU for --dali_device=gpu."""
    if flag == "gpu" and world.gpu is None:
        raise UserError("--dali_device=gpu: TensorFlow sees no GPU here; use --dali_device=cpu or auto")
    return flag if flag != "auto" else "cpu" if world.gpu is None else "gpu"


def make_model(recipe: Recipe, dataset: Dataset):
    tf.keras.mixed_precision.set_global_policy(recipe.precision)
    sizes = {*recipe.image_size.values, recipe.validation_image_size}
    return model_zoo.create_model(
        recipe.model, len(dataset.classes), sizes.pop() if len(sizes) == 1 else None, seed=recipe.seed,
        batch_norm_momentum=recipe.batch_norm_momentum, mean=dataset.mean, std=dataset.std,
        last_gamma=recipe.last_gamma, drop_path=recipe.drop_path)


def make_exchange(launch: Launch, allreduce: AllreducePlan, nccl: bool) -> GradientExchange:
    """Creates the gradient exchange. Call it before Horovod starts, which needs its process sets."""
    collectives = make_collectives(allreduce, nccl)
    return GradientExchange(collectives, launch.compression, launch.fusion_mb, allreduce)


def make_state(settings: Settings, dataset: Dataset) -> State:
    """Creates the model, the optimizer and all else that a training changes. Raises UserError."""
    recipe, run = settings.recipe, settings.run
    model = make_model(recipe, dataset)
    moving = MovingStatistics(model) if recipe.batch_norm_statistics == "moving" and not recipe.freeze else None
    noise = NoiseScale(len(trained_variables(model, recipe.freeze))) if run.log_noise_scale else None
    return State(model, make_optimizer(recipe, model, settings.launch.xla == "true"),
                 logs_layers=run.log_trust_ratios or run.log_noise_scale, average=make_average(recipe, model),
                 moving=moving, noise=noise, freeze=recipe.freeze)


def make_optimizer(recipe: Recipe, model, xla: bool = False):
    """Creates the optimizer in Horovod's DistributedOptimizer.

    xla: whether XLA compiles its updates. Raises UserError if --exclude matches nothing.
    """
    optimizer = optim.create_optimizer(
        recipe.optimizer, learning_rate=0.0, momentum=recipe.momentum, weight_decay=recipe.weight_decay,
        trust_coefficient=recipe.trust_coefficient, epsilon=recipe.lars_epsilon, exclude=recipe.exclude,
        nesterov=recipe.nesterov, clip=recipe.lars_clip, jit_compile=xla)
    optimizer = distributed.wrap(optimizer, recipe.precision == "mixed_float16", recipe.loss_scale)
    try:
        distributed.build(optimizer, trained_variables(model, recipe.freeze))
    except ValueError as error:
        raise UserError(f"--exclude: {error}") from None
    return optimizer


def make_average(recipe: Recipe, model) -> WeightAverage | None:
    """Creates the moving average of the weights, if there is one. Call it when the model has its initial weights."""
    if not recipe.ema_decay:
        return None
    return WeightAverage(model, recipe.ema_decay, recipe.batch_size.values[0],
                         recipe.batch_norm_statistics == "moving")


def make_evaluator(settings: Settings, model, feed, world: World, average: WeightAverage | None = None,
                   guesses: int = 0) -> Evaluator:
    return Evaluator(model, feed, settings.launch.micro_batch_size or LARGEST_MICRO_BATCH, world, average=average,
                     guesses=guesses, views=settings.recipe.evaluation_views)
