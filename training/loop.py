"""The training loop. It trains the intervals of the plan one by one.

It replaces Keras's `fit`, which needs the same number of steps in each epoch and one input for all of them. Here a
phase can change the batch size, an evaluation follows each epoch of samples, and a run can resume at any step.
"""
import functools
import time
from collections.abc import Sequence

from common.startup import startup
from reporting.observer import Evaluation, top1_of
from training.bad_input import bad_input_is_user_error
from training.batch_norm import Span
from training.breakdown import TIMED_ONE_IN, StepTimes, breakdown_of
from training.build import Job
from training.noise_scale import NoiseScale
from training.pending import Pending, Step
from training.plan import Interval
from training.profiling import profiled
from training.reading import TrainingInput
from training.recovery import Recovery
from training.slow import SlowWorkers
from training.state import digest


def follow_plan(job: Job, recovery: Recovery, observers: Sequence = ()) -> dict:
    """Trains the rest of the plan; returns the last evaluation's metrics.

    Raises Diverged and Stopped on all workers at once, and UserError if training cannot continue.
    """
    progress, times, noise, metrics = job.state.progress, StepTimes(), NoiseScale(), None
    slow = SlowWorkers()
    with TrainingInput(job) as training_input:
        for interval in job.plan.intervals():
            if target_is_reached(job):
                break
            if progress.step < interval.end:
                if interval.phase.workers != job.world.size:
                    recovery.hand_over(interval.phase.workers)
                train_step, batch_size = job.train_step(interval.phase), interval.phase.global_batch_size
                first, batches = progress.step, training_input.read_on(interval)
            with Pending(job, observers, times, noise) as pending:
                while progress.step < interval.end:
                    began = time.perf_counter()
                    step = next_step(job, interval, first)
                    signals = pending.settle_before(step)
                    launched = time.perf_counter()
                    with bad_input_is_user_error(f"training stopped at epoch {step.epoch:.3f}", batches,
                                                 training_input.samples_before(step.number, interval)), \
                            profiled(observers, step.number):
                        admitted = batches.admit(len(interval.phase.micro_batches_of(job.world.rank, job.world.size)))
                        arguments = batches.iterator, *step.arguments, recovery.signals()
                        if startup.is_open:
                            with startup.stage("tracing a step"):
                                train_step.get_concrete_function(*arguments)
                        with startup.stage("the first step"):
                            packed = train_step(*arguments)
                    progress.step += 1
                    progress.samples += batch_size
                    is_last = progress.step == interval.end
                    signals += pending.add(step, packed, launched, is_last, admitted.seconds)
                    seconds = time.perf_counter() - began
                    progress.trained_seconds += seconds
                    times.add(batch_size, seconds, admitted)
                    if recovery.is_due_after(signals):
                        signals += pending.settle()
                        recovery.after_step(signals, before_evaluation=is_last and interval.evaluates)
            if interval.evaluates and progress.evaluations < interval.evaluations:
                metrics = validate(job, interval, recovery, observers, times, noise, slow)
    return metrics or job.evaluate().metrics


def next_step(job: Job, interval: Interval, first: int) -> Step:
    """Returns the step after the last one launched. first: the step at which reading of the interval starts.

    The second step is timed, and every TIMED_ONE_IN-th after it. The first may have to wait until all workers begin.
    """
    number, phase = job.state.progress.step, interval.phase
    epoch = job.plan.epoch_of(number)
    is_timed = (number - first) % TIMED_ONE_IN == min(1, interval.end - first - 1)
    return Step(number, job.plan.position(number) + job.state.progress.skipped, epoch, job.plan.learning_rate(epoch),
                job.plan.step_momentum(number), phase.global_batch_size, phase.micro_batch_size,
                is_timed or job.settings.run.timeline is not None)


def validate(job: Job, interval: Interval, recovery: Recovery, observers, times: StepTimes, noise: NoiseScale,
             slow: SlowWorkers) -> dict:
    """Evaluates after an interval, notifies the observers and saves a checkpoint if one is due; returns the metrics."""
    state, phase, world = job.state, interval.phase, job.world
    measure = functools.partial(
        job.exact.measure, job.feed, measured_after(job, interval), phase.global_batch_size, phase.micro_batch_size,
        Span.of(phase, world.size)) if job.exact else lambda: None
    state.write_statistics()
    validation = job.evaluate(recovery.stop_is_asked, measure)
    if validation is None:
        recovery.stop()
    metrics = validation.metrics
    rates, trained, progress = job.plan.rates(interval.epoch), state.totals.collect(), state.read_clock()
    row = {"epoch": interval.epoch, "samples": progress.samples, "learning_rate": rates["learning_rate"],
           "momentum": rates["momentum"], "batch_size": rates["global_batch_size"],
           "train_loss": trained["loss"], "train_top1": trained["top1"],
           **{name: value for name, value in metrics.items() if not name.endswith(("_count", "_samples"))},
           "weights": digest(state.model), "images_per_second": times.images_per_second(), "seconds": progress.seconds}
    workers, layers = times.gather(world), job.layers()
    named = slow.add(workers, [len(phase.micro_batches_of(rank, world.size)) for rank in range(world.size)])
    measured = noise.collect([*layers], [ratio for *_, ratio in layers.values()])
    with world.raise_on_all_ranks():
        for observer in observers:
            observer.evaluation(Evaluation(row, layers, breakdown_of(workers), validation.outcomes, measured,
                                           [one.host for one in workers], [one.means for one in workers], named))
    progress.add_evaluation(interval.epoch, top1_of(row), row["seconds"])
    progress.statistics_step = progress.step if job.exact else None
    recovery.after_evaluation(interval.epoch, top1_of(row), target_is_reached(job))
    return metrics


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
