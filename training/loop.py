"""The training loop: the updates of each interval of the plan, then its evaluation.

It replaces Keras's `fit`, which needs the same number of steps in each epoch and one input for all of them. Here a
phase can change the batch size, an evaluation follows each epoch of samples, and a run can resume at any step.

The host is one step ahead of the device: it launches a step before it knows the results of the one before. Only a timed
step runs alone, and the results of the first step of all and of the last step of an interval are known before anything
else happens.
"""
import contextlib
import functools
import time
from collections.abc import Iterator, Sequence

from common import metric
from common.activity import OBSERVERS, activity, startup
from common.errors import complain
from common.run_folder import top1_of
from plan.plan import Interval
from training.bad_input import bad_input_is_user_error
from training.breakdown import breakdown_of, timed_every
from training.build import Setup
from training.clock import batch_counts
from training.divergence import BelowExpected
from training.evaluate import EvaluationResult
from training.observer import Evaluation, Observer
from training.reading import TrainingInput
from training.recovery import Recovery
from training.results import Results, Step
from training.weight_check import in_hexadecimal


def follow_plan(setup: Setup, recovery: Recovery, observers: Sequence[Observer] = ()) -> EvaluationResult:
    """Trains the rest of the plan; returns the last evaluation.

    Raises Diverged and Stopped on all workers at once, and UserError if training cannot continue.
    """
    result = None
    with TrainingInput(setup) as data, Results(setup, observers) as results:
        for interval in setup.plan.intervals():
            if early_end(setup):
                break
            train(interval, setup, data, results, recovery)
            if interval.evaluates and setup.state.progress.evaluations < interval.evaluations:
                result = evaluate_after(interval, setup, results, recovery)
    return result or setup.evaluate()


def train(interval: Interval, setup: Setup, data: TrainingInput, results: Results, recovery: Recovery) -> None:
    """Makes the updates that are left of an interval, and saves a checkpoint or stops after an update if that is due.

    Raises Diverged for the first step that diverged, UserError for data that cannot be read, and Stopped, also if the
    phase needs another number of workers.
    """
    progress, phase, first = setup.state.progress, interval.phase, setup.state.progress.step
    if first >= interval.end:
        return
    if phase.workers != setup.world.size:
        recovery.hand_over(phase.workers)
    micro_batches = len(phase.micro_batches_of(setup.world.rank, setup.world.size))
    train_step, batches = setup.train_step(phase), data.batches_of(interval)
    inside = functools.partial(batch_counts().in_update, phase.neighbours > 1)
    with activity.during("training", inside):
        while progress.step < interval.end:
            began = time.perf_counter()
            step = next_step(setup, interval, first)
            activity.step = step.number
            signals = results.settle(leaving=0 if step.timed else 1)
            launched = time.perf_counter()
            with launching(step, batches, data.samples_before(step.number, interval), results.observers):
                admitted = batches.admit(micro_batches)
                with startup.stage("the first step", inside) if startup.is_open else contextlib.nullcontext():
                    packed = train_step(batches.iterator, step.input(recovery.signals()))
            progress.add_step(step.batch_size)
            results.add(step, packed, launched, admitted)
            signals |= results.settle(leaving=0 if step.timed or step.is_last or not step.number else 1)
            seconds = time.perf_counter() - began
            progress.trained_seconds += seconds
            results.times.add(step.batch_size, seconds, admitted)
            if recovery.is_due_after(signals):
                signals |= results.settle()
                recovery.after_step(signals, before_evaluation=step.is_last and interval.evaluates)


def next_step(setup: Setup, interval: Interval, first: int) -> Step:
    """Returns the step after the last one launched. first: the step at which this process began the interval.

    The second step from there is timed, and every n-th after it (timed_every). The first may have to wait until all
    workers begin.
    """
    plan, phase = setup.plan, interval.phase
    number = setup.state.progress.step
    epoch = plan.epoch_of(number)
    steps, made = interval.end - first, number - first
    is_timed = steps == 1 or (made > 0 and (made - 1) % timed_every(steps) == 0)
    return Step(
        number, position=plan.position(number) + setup.state.progress.skipped, epoch=epoch,
        learning_rate=plan.learning_rate(epoch), momentum=plan.step_momentum(number),
        batch_size=phase.global_batch_size, micro_batch_size=phase.micro_batch_size,
        timed=is_timed or setup.settings.run.timeline is not None, is_last=number + 1 == interval.end)


@contextlib.contextmanager
def launching(step: Step, batches, read: int, observers: Sequence[Observer]) -> Iterator[None]:
    """Context manager for the launch of a step, in which data that cannot be read raises UserError.

    read: number of samples of `batches` read before.
    """
    with bad_input_is_user_error(f"training stopped at epoch {step.epoch:.3f}", batches, read), \
            contextlib.ExitStack() as held:
        for observer in observers:
            held.enter_context(observer.launching(step.number))
        yield


def evaluate_after(interval: Interval, setup: Setup, results: Results, recovery: Recovery) -> EvaluationResult:
    """Evaluates after an interval, notifies the observers and saves a checkpoint if one is due.

    Raises WeightsDiffer, before an observer learns of the evaluation, and BelowExpected, unless training ends here.
    """
    state, phase, world, curve = setup.state, interval.phase, setup.world, setup.settings.run.expect
    measure = functools.partial(
        setup.exact.measure, setup.feed, measured_after(setup, interval), phase) if setup.exact else lambda: None
    state.write_statistics()
    result = setup.evaluate(recovery.stop_is_asked, measure)
    if result is None:
        recovery.stop()
    weights = in_hexadecimal(recovery.snapshot().checksums["model"])
    row = collect_row(setup, interval, result.metrics) | {
        metric.WEIGHTS: weights, metric.IMAGES_PER_SECOND: results.times.images_per_second(),
        metric.SECONDS: state.progress.seconds}
    workers = results.times.gather(world)
    layers = setup.layers()
    slow = results.slow.add(workers, [len(phase.micro_batches_of(rank, world.size)) for rank in range(world.size)])
    noise = state.noise.collect([*layers], state.layers.ratios()) if state.noise else {}
    expected = curve and world.broadcast(curve.top1_at(interval.epoch), "expected")  # the file may be growing
    evaluation = Evaluation(row, layers, breakdown_of(workers), result.outcomes, noise=noise, hosts=workers.hosts,
                            workers=workers.means, slow=slow, expected=expected)
    with world.raise_on_all_ranks(), activity.during(OBSERVERS):
        for observer in results.observers:
            observer.evaluation(evaluation)
    state.progress.add_evaluation(interval.epoch, top1_of(row), row[metric.SECONDS], setup.exact is not None)
    reason, most = early_end(setup), setup.settings.run.stop_below_expected
    is_planned = interval.end == setup.plan.steps  # to be the last
    goes_on = not (reason or is_planned)
    recovery.after_evaluation(interval.epoch, top1_of(row), result.outcomes, is_last=not goes_on)
    if reason and not is_planned and world.rank == 0:
        complain(f"{reason}, so training ends at epoch {interval.epoch:g} of {setup.plan.epochs:g}{rate_left(setup)}")
    if goes_on and None not in (expected, most) and top1_of(row) < expected - most / 100:
        raise BelowExpected(interval.end, interval.epoch, top1_of(row), expected, curve.path)
    return result


def collect_row(setup: Setup, interval: Interval, metrics: dict[str, float]) -> dict:
    """Returns what a row of metrics.jsonl says of an evaluation and the training before it, and resets the totals.

    The loss and top-1 of the training are sums that the compiled steps keep on the device, not the results that
    observers see after each step.
    """
    rates = setup.plan.rates(interval.epoch)
    trained = setup.state.totals.collect()
    progress = setup.state.read_clock()
    return {metric.EPOCH: interval.epoch, metric.SAMPLES: progress.samples,
            metric.LEARNING_RATE: rates["learning_rate"], metric.MOMENTUM: rates["momentum"],
            metric.BATCH_SIZE: rates["global_batch_size"],
            metric.TRAIN_LOSS: trained["loss"], metric.TRAIN_TOP1: trained["top1"],
            **{name: value for name, value in metrics.items() if not name.endswith(("_count", "_samples"))},
            **({metric.SKIPPED: progress.skipped} if progress.skipped else {})}


def early_end(setup: Setup) -> str:
    """Returns why training ends before the end of the plan, or an empty string. All ranks return the same.

    Evaluations without a better one are counted by the plan, so that a resumed training counts on.
    """
    run, progress = setup.settings.run, setup.state.progress
    if not (best := progress.best):
        return ""
    if run.stop_at_target and best["top1"] >= run.target_top1:
        return f"--target_top1={run.target_top1:g} is reached"
    if not run.patience:
        return ""
    until_best = max((one.evaluations for one in setup.plan.intervals()
                      if one.evaluates and one.epoch <= best["epoch"]), default=0)
    if progress.evaluations - until_best >= run.patience:
        return f"no evaluation since epoch {best['epoch']:g} was better (--patience={run.patience})"
    return ""


def rate_left(setup: Setup) -> str:
    """Returns what an early end means for a learning rate that was to fall further, or an empty string."""
    plan, progress = setup.plan, setup.state.progress
    now, last = plan.learning_rate(plan.epoch_of(progress.step)), plan.learning_rate(plan.epochs)
    return (f"; the learning rate is {now:.3g} and would have fallen to {last:.3g}, which often gains the most; "
            f"--epochs={plan.epoch_of(progress.step):.0f} lets it") * (last < now)


def measured_after(setup: Setup, interval: Interval) -> list[int]:
    """Returns the positions in the stream at which batch norm's statistics are measured.

    They are the ends of this interval and of the later ones of its phase that an evaluation follows. Each occurs twice
    if there is a moving average of the weights, which is evaluated, too.
    """
    return [later.position(later.end) + setup.state.progress.skipped for later in setup.plan.intervals()
            if later.phase is interval.phase and later.evaluates and later.end >= interval.end
            for _ in range(2 if setup.state.average else 1)]
