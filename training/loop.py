"""The training loop: interval by interval of the plan, each read by a pipeline of its own from its position on.

A loop of ours and not Keras's `fit`, which wants epochs of equal numbers of steps and an input that lives on: here a
phase changes the batch, evaluations come where a whole epoch of samples is done, and a run can go on from any of them.
"""
import contextlib
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from training.bad_input import bad_input_is_user_error
from training.batch_norm import Span
from training.breakdown import StepTimes
from training.build import Job
from training.divergence import Diverged
from training.plan import Interval
from training.recovery import Recovery


def follow_plan(job: Job, recovery: Recovery, observers: Sequence = ()) -> dict:
    """Trains through what is left of the plan; returns the last evaluation.

    Raises Diverged and Stopped on all workers at once, UserError where training cannot go on.
    """
    progress, times, validation = job.state.progress, StepTimes(), None
    for interval in job.plan.intervals():
        batch_size, began = interval.phase.global_batch_size, time.perf_counter()
        train_step = job.train_step(interval.phase)
        with read_on(job, interval) as batches:
            first = progress.step
            while progress.step < interval.end:
                epoch = interval.position(progress.step) / job.plan.train_samples
                rate, momentum = job.plan.learning_rate(epoch), job.plan.momentum_of(interval.phase)
                read = (progress.step - first) * batch_size // job.world.size
                with bad_input_is_user_error(f"training stopped at epoch {epoch:.3f}", batches, read):
                    learned = train_step(batches.iterator, tf.constant(rate, tf.float32),
                                         tf.constant(momentum, tf.float32), recovery.signals())
                    signals, loss, squares, waited = (tensor.numpy() for tensor in learned)
                if problem := job.divergence(float(loss), squares):
                    raise Diverged(problem, progress.step, epoch, rate)
                for observer in observers:
                    observer.step(batch_size, layers(job) if not progress.step else {})
                seconds, began = time.perf_counter() - began, time.perf_counter()
                progress.step += 1
                progress.samples += batch_size
                progress.trained_seconds += seconds
                times.add(batch_size, seconds, waited)
                recovery.after_step(signals, before_evaluation=progress.step == interval.end and interval.evaluates)
        if interval.evaluates and progress.evaluations < interval.evaluations:
            validation = validate(job, interval, recovery, observers, times)
    return validation or job.evaluate()


@contextlib.contextmanager
def read_on(job: Job, interval: Interval) -> Iterator:
    """The batches of an interval that are left to train on; None where it is done."""
    progress, phase = job.state.progress, interval.phase
    if progress.step >= interval.end:
        yield None
        return
    progress.reshard_step = start = max(progress.reshard_step, interval.first_step)
    with job.feed.train(interval.position(start) + progress.skipped, interval.end - start, phase.global_batch_size,
                        phase.micro_batch_size, progress.step - start, phase.neighbours) as batches:
        yield batches


def validate(job: Job, interval: Interval, recovery: Recovery, observers, times: StepTimes) -> dict:
    """Evaluates after an interval, and tells the observers, and what is due to be saved."""
    state, phase, world = job.state, interval.phase, job.world
    if job.exact:
        job.exact.measure(job.feed, interval.position(interval.end) + state.progress.skipped, phase.global_batch_size,
                          phase.micro_batch_size, Span.of(phase, world.size))
    validation = job.evaluate(recovery.stop_is_asked)
    if validation is None:
        recovery.stop()
    rates, trained, progress = job.plan.rates(interval.epoch), state.totals.collect(world), state.read_clock()
    row = {"epoch": interval.epoch, "samples": progress.samples, "learning_rate": rates["learning_rate"],
           "momentum": rates["momentum"], "batch_size": rates["global_batch_size"],
           "train_loss": trained["loss"], "train_top1": trained["top1"],
           **{name: validation[name] for name in ("val_loss", "val_top1", "val_top5")},
           "images_per_second": times.images_per_second(), "seconds": progress.seconds}
    breakdown = times.collect(world)
    with world.raise_on_all_ranks():
        for observer in observers:
            observer.evaluation(row, layers(job), breakdown)
    progress.evaluations += 1
    recovery.after_evaluation(interval.epoch, validation["val_top1"])
    return validation


def layers(job: Job) -> dict:
    """The statistics of each layer at the last update, where they are logged."""
    return job.state.layers.collect() if job.state.layers else {}
