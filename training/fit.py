"""The training loop: interval by interval of the plan, each read by a pipeline of its own from its place on.

A loop of ours and not Keras's `fit`, which wants epochs of equal numbers of steps and an input that lives on: here a
phase changes the batch, evaluations come where a whole epoch of samples is done, and a run can go on from any of them.
"""
import time

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

import model_zoo
import optim
from data import synthetic
from data.feed import Feed
from data.pipeline import Device
from data.synthetic import SyntheticFeed
from optim import exchange
from training import workers
from training.batch_norm import ExactStatistics
from training.checkpoints import Checkpoints, load_model
from training.errors import UserError
from training.evaluate import Evaluator
from training.plan import DEFAULT_LARGEST_MICRO_BATCH, Plan
from training.step import LayerNorms, Totals, make_train_step


def make_feed(config, dataset, worker) -> Feed | SyntheticFeed:
    name = workers.dali_device(config.dali_device, worker)
    if dataset.format == synthetic.NAME:
        return SyntheticFeed(dataset, config.image_size, config.seed, worker.rank, worker.size)
    device = Device(name, worker.gpu if name == "gpu" else None, config.dali_threads or worker.cores,
                    config.hw_decoder_load)
    return Feed(dataset, config.image_size, config.augmentation, config.seed, worker.rank, worker.size, device)


def make_model(config, dataset, stream=0):
    tf.keras.mixed_precision.set_global_policy(config.precision)
    return model_zoo.create_model(config.model, len(dataset.classes), config.image_size, config.batch_norm_momentum,
                                  config.seed, stream, dataset.mean, dataset.std)


def make_optimizer(config, model):
    """The optimizer in Horovod's wrap, with its variables made. Raises UserError if --lars_exclude matches nothing."""
    optimizer = exchange.distributed(
        optim.create_optimizer(
            config.optimizer, learning_rate=0.0, momentum=config.momentum, weight_decay=config.weight_decay,
            trust_coefficient=config.trust_coefficient, epsilon=config.lars_epsilon,
            exclude=tuple(config.lars_exclude)),
        config.compression, loss_scaling=config.precision == "mixed_float16")
    try:
        if hasattr(exchange.inner(optimizer), "build"):  # LAMB, of the older kind, makes its own later
            exchange.inner(optimizer).build(model.trainable_variables)
    except ValueError as error:
        raise UserError(f"--lars_exclude: {error}") from None
    return optimizer


def make_evaluator(config, model, feed) -> Evaluator:
    return Evaluator(model, feed, config.micro_batch_size or DEFAULT_LARGEST_MICRO_BATCH)


class Fit:
    """A training under way: the model, its optimizer, and what they have done so far."""

    def __init__(self, config, plan: Plan, feed: Feed, model, optimizer):
        self._config, self._plan, self._feed, self._model, self._optimizer = config, plan, feed, model, optimizer
        self._evaluate, self._totals = make_evaluator(config, model, feed), Totals()
        self._exact = ExactStatistics(model) if config.batch_norm_statistics == "exact" else None
        self._norms = LayerNorms(optimizer, model.trainable_variables) if config.log_trust_ratios else None
        self._steps = {}
        self.started, self.trained, self.seconds = time.perf_counter(), 0, 0.0

    def run(self, checkpoint_folder, observers) -> dict:
        """Trains through the plan; returns summary.json's content.

        observers: reporting's, on rank 0 alone.
        """
        plan, saved, since = self._plan, 0.0, (0, 0.0)
        hvd.broadcast_variables(self._model.variables, root_rank=0)
        checkpoints = Checkpoints(checkpoint_folder, self._model, self._optimizer) if hvd.rank() == 0 else None
        for interval in plan.intervals():
            self._train(interval, observers)
            if interval.epoch is None:
                continue
            validation = self._validate(interval)
            row = _row(plan, interval.epoch, self.trained, self._totals.collect(), validation)
            row |= {"images_per_second": (self.trained - since[0]) / (self.seconds - since[1]),
                    "seconds": time.perf_counter() - self.started}
            since = self.trained, self.seconds
            last = interval.first_step + interval.steps == plan.steps
            with workers.together():
                if checkpoints and (last or interval.epoch >= saved + self._config.checkpoint_every):
                    checkpoints.save(interval.epoch)
                    saved = interval.epoch
                for observer in observers:
                    observer.evaluation(row, self._norms.collect() if self._norms else {})
        workers.check_same_weights(self._model.variables)
        return summary(validation, plan.train_samples, plan.epochs, interval.phase.global_batch_size,
                       self.trained / self.seconds, time.perf_counter() - self.started)

    def _train(self, interval, observers):
        begun, plan, batch_size = time.perf_counter(), self._plan, interval.phase.global_batch_size
        step = self._step(interval.phase.accumulation_steps)
        momentum = tf.constant(plan.momentum_of(interval.phase), tf.float32)
        with self._feed.train(interval.start, interval.steps, batch_size, interval.phase.micro_batch_size) as batches:
            for number in range(interval.steps):
                epoch = (interval.start + number * batch_size) / plan.train_samples
                try:
                    step(batches.iterator, tf.constant(plan.learning_rate(epoch), tf.float32), momentum)
                except (tf.errors.OpError, HorovodInternalError) as error:
                    why = workers.input_reason(error, batches, number * batch_size // hvd.size())
                    raise UserError(f"training stopped at epoch {epoch:.3f}: {why}") from None
                for observer in observers:
                    observer.step(batch_size, self._norms.collect() if self._norms and not self.trained else {})
                self.trained += batch_size
        self.seconds += time.perf_counter() - begun

    def _step(self, accumulation_steps):
        """The compiled update for so many micro-batches, made once."""
        if accumulation_steps not in self._steps:
            self._steps[accumulation_steps] = make_train_step(
                self._model, self._optimizer, self._totals, accumulation_steps, self._config.label_smoothing,
                self._config.xla, moving_statistics=not self._exact, norms=self._norms)
        return self._steps[accumulation_steps]

    def _validate(self, interval):
        phase = interval.phase
        if self._exact:
            position = interval.start + interval.steps * phase.global_batch_size
            self._exact.measure(self._feed, position, phase.global_batch_size, phase.micro_batch_size)
        return self._evaluate()


def _row(plan, epoch, trained, train_totals, val_totals):
    """A row of metrics.jsonl, without its times."""
    rates = plan.rates(epoch)
    return {"epoch": epoch, "samples": trained, "learning_rate": rates["learning_rate"],
            "momentum": rates["momentum"], "batch_size": rates["global_batch_size"],
            "train_loss": train_totals["loss"], "train_top1": train_totals["top1"],
            **{name: val_totals[name] for name in ("val_loss", "val_top1", "val_top5")}}


def evaluate_checkpoint(config, dataset, feed, batch_size: int) -> dict:
    """summary.json's content for the newest checkpoint of --checkpoint."""
    started = time.perf_counter()
    model = make_model(config, dataset)
    with workers.together():
        epoch = load_model(config.checkpoint, model)
    evaluate = make_evaluator(config, model, feed)
    begun = time.perf_counter()
    totals = evaluate()
    speed = totals["val_samples"] / (time.perf_counter() - begun)
    return summary(totals, dataset.train.samples, epoch, batch_size, speed, time.perf_counter() - started)


def summary(totals, train_samples, epochs, batch_size, images_per_second, seconds) -> dict:
    names = ("val_top1", "val_top5", "val_loss", "val_samples", "val_top1_count", "val_top5_count")
    return {name: totals[name] for name in names} | {
        "train_samples": train_samples, "epochs": epochs, "global_batch_size": batch_size, "world_size": hvd.size(),
        "images_per_second": images_per_second, "seconds": seconds}
