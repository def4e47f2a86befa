"""The training loop: interval by interval of the plan, each read by a pipeline of its own from its place on.

A loop of ours and not Keras's `fit`, which wants epochs of equal numbers of steps and an input that lives on: here a
phase changes the batch, evaluations come where a whole epoch of samples is done, and a run can go on from any of them.
"""
import time

import horovod.tensorflow as hvd
import tensorflow as tf

import model_zoo
import optim
from data.feed import Feed
from optim import exchange
from training import workers
from training.checkpoints import Checkpoints, load_model
from training.errors import UserError
from training.evaluate import Evaluator
from training.plan import DEFAULT_LARGEST_MICRO_BATCH, Plan
from training.step import Totals, make_train_step


def make_feed(config, dataset, worker) -> Feed:
    device = workers.dali_device(config.dali_device, worker)
    return Feed(dataset, config.image_size, config.augmentation, config.seed, worker.rank, worker.size, device,
                worker.gpu if device == "gpu" else None, config.dali_threads or worker.cores)


def make_model(config, dataset, stream=0):
    return model_zoo.create_model(config.model, len(dataset.classes), config.image_size, config.batch_norm_momentum,
                                  config.seed, stream)


def make_optimizer(config, model):
    """The optimizer in Horovod's wrap, with its variables made. Raises UserError if --lars_exclude matches nothing."""
    optimizer = exchange.distributed(
        optim.create_optimizer(
            config.optimizer, learning_rate=0.0, momentum=config.momentum, weight_decay=config.weight_decay,
            trust_coefficient=config.trust_coefficient, epsilon=config.lars_epsilon,
            exclude=tuple(config.lars_exclude)),
        config.compression)
    try:
        if hasattr(optimizer, "build"):  # LAMB is of the older kind, which makes its variables at the first step
            optimizer.build(model.trainable_variables)
    except ValueError as error:
        raise UserError(f"--lars_exclude: {error}") from None
    return optimizer


def make_evaluator(config, model, feed) -> Evaluator:
    return Evaluator(model, feed, config.micro_batch_size or DEFAULT_LARGEST_MICRO_BATCH)


def train(config, plan: Plan, feed: Feed, model, optimizer, checkpoint_folder, observers) -> dict:
    """Trains through the plan; returns summary.json's content.

    observers: reporting's, on rank 0 alone: `step(samples)` and `evaluation(row, totals)` are called.
    """
    started = time.perf_counter()
    hvd.broadcast_variables(model.variables, root_rank=0)
    checkpoints = Checkpoints(checkpoint_folder, model, optimizer) if hvd.rank() == 0 else None
    evaluate, totals, steps = make_evaluator(config, model, feed), Totals(), {}
    trained, training_seconds, interval_samples, interval_seconds, saved = 0, 0.0, 0, 0.0, 0.0
    for interval in plan.intervals():
        phase = interval.phase
        step = steps.get(phase.accumulation_steps) or steps.setdefault(phase.accumulation_steps, make_train_step(
            model, optimizer, totals, phase.accumulation_steps, config.label_smoothing, config.xla))
        begun = time.perf_counter()
        _run_steps(plan, interval, feed, step, observers)
        interval_seconds += time.perf_counter() - begun
        interval_samples += interval.steps * phase.global_batch_size
        if interval.epoch is None:
            continue
        trained, training_seconds = trained + interval_samples, training_seconds + interval_seconds
        validation = evaluate()
        row = _row(plan, interval.epoch, trained, totals.collect(), validation)
        row |= {"images_per_second": interval_samples / interval_seconds, "seconds": time.perf_counter() - started}
        interval_samples, interval_seconds = 0, 0.0
        last = interval.first_step + interval.steps == plan.steps
        with workers.together():
            if checkpoints and (last or interval.epoch >= saved + config.checkpoint_every):
                checkpoints.save(interval.epoch)
                saved = interval.epoch
            for observer in observers:
                observer.evaluation(row)
    workers.check_same_weights(model.variables)
    return summary(validation, plan.train_samples, plan.epochs, phase.global_batch_size, trained / training_seconds,
                   time.perf_counter() - started)


def _run_steps(plan, interval, feed, step, observers):
    batch_size = interval.phase.global_batch_size
    momentum = tf.constant(plan.momentum_of(interval.phase), tf.float32)
    with feed.train(interval.start, interval.steps, batch_size, interval.phase.micro_batch_size) as batches:
        for number in range(interval.steps):
            epoch = (interval.start + number * batch_size) / plan.train_samples
            step(batches, tf.constant(plan.learning_rate(epoch), tf.float32), momentum)
            for observer in observers:
                observer.step(batch_size)


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
