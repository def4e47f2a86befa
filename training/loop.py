"""The training loop. It trains the intervals of the plan one by one.

It replaces Keras's `fit`, which needs the same number of steps in each epoch and one input for all of them. Here a
phase can change the batch size, an evaluation follows each epoch of samples, and a run can resume at any step.
"""
import functools
from collections.abc import Sequence

from common.activity import OBSERVERS, activity
from plan.plan import Interval
from plan.run_folder import top1_of
from training.batch_norm import Span
from training.breakdown import breakdown_of
from training.build import Job
from training.observer import Evaluation, Observer
from training.recovery import Recovery
from training.updates import Updates
from training.weight_check import in_hexadecimal


def follow_plan(job: Job, recovery: Recovery, observers: Sequence[Observer] = ()) -> dict:
    """Trains the rest of the plan; returns the last evaluation's metrics.

    Raises Diverged and Stopped on all workers at once, and UserError if training cannot continue.
    """
    metrics = None
    with Updates(job, recovery, observers) as updates:
        for interval in job.plan.intervals():
            if target_is_reached(job):
                break
            for step in updates.of(interval):
                with updates.launching(step) as (train_step, arguments):
                    packed = train_step(*arguments)
                updates.add(step, packed)
            if interval.evaluates and job.state.progress.evaluations < interval.evaluations:
                metrics = validate(interval, updates)
    return metrics or job.evaluate().metrics


def validate(interval: Interval, updates: Updates) -> dict:
    """Evaluates after an interval, notifies the observers and saves a checkpoint if one is due; returns the metrics.

    Raises WeightsDiffer, before an observer learns of the evaluation.
    """
    job, recovery = updates.job, updates.recovery
    state, phase, world = job.state, interval.phase, job.world
    measure = functools.partial(
        job.exact.measure, job.feed, measured_after(job, interval), phase.global_batch_size, phase.micro_batch_size,
        Span.of(phase, world.size)) if job.exact else lambda: None
    state.write_statistics()
    validation = job.evaluate(recovery.stop_is_asked, measure)
    if validation is None:
        recovery.stop()
    weights = in_hexadecimal(recovery.snapshot().checksums["model"])
    row = row_of(job, interval, validation.metrics) | {
        "weights": weights, "images_per_second": updates.times.images_per_second(), "seconds": state.progress.seconds}
    workers = updates.times.gather(world)
    layers = job.layers()
    slow = updates.slow.add(workers, [len(phase.micro_batches_of(rank, world.size)) for rank in range(world.size)])
    noise = state.noise.collect([*layers], [ratio for *_, ratio in layers.values()]) if state.noise else {}
    evaluation = Evaluation(row, layers, breakdown_of(workers), validation.outcomes, noise, workers.hosts,
                            workers.means, slow)
    with world.raise_on_all_ranks(), activity.during(OBSERVERS):
        for observer in updates.observers:
            observer.evaluation(evaluation)
    state.progress.add_evaluation(interval.epoch, top1_of(row), row["seconds"])
    state.progress.statistics_step = state.progress.step if job.exact else None
    recovery.after_evaluation(interval.epoch, top1_of(row), target_is_reached(job))
    return validation.metrics


def row_of(job: Job, interval: Interval, metrics: dict[str, float]) -> dict:
    """Returns what a row of metrics.jsonl says of an evaluation and the training before it. It starts new totals."""
    rates = job.plan.rates(interval.epoch)
    trained = job.state.totals.collect()
    progress = job.state.read_clock()
    return {"epoch": interval.epoch, "samples": progress.samples, "learning_rate": rates["learning_rate"],
            "momentum": rates["momentum"], "batch_size": rates["global_batch_size"],
            "train_loss": trained["loss"], "train_top1": trained["top1"],
            **{name: value for name, value in metrics.items() if not name.endswith(("_count", "_samples"))},
            **({"skipped": progress.skipped} if progress.skipped else {})}


def target_is_reached(job: Job) -> bool:
    """Whether training is to end because an evaluation has reached the target."""
    run, best = job.settings.run, job.state.progress.best
    return run.stop_at_target and best is not None and best["top1"] >= run.target_top1


def measured_after(job: Job, interval: Interval) -> list[int]:
    """Returns the positions in the stream at which batch norm's statistics are measured from an evaluation on.

    They are those of the evaluations of this phase. With a moving average of the weights, each is measured twice.
    """
    return [later.position(later.end) + job.state.progress.skipped for later in job.plan.intervals()
            if later.phase is interval.phase and later.evaluates and later.end >= interval.end
            for _ in range(2 if job.state.average else 1)]
