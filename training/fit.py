"""The training loop: interval by interval of the plan, each read by a pipeline of its own from its place on.

A loop of ours and not Keras's `fit`, which wants epochs of equal numbers of steps and an input that lives on: here a
phase changes the batch, evaluations come where a whole epoch of samples is done, and a run can go on from any of them.
"""
import time
from collections.abc import Callable

import horovod.tensorflow as hvd
import tensorflow as tf

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
from training.clock import Shares
from training.errors import UserError, complain
from training.evaluate import Evaluator
from training.faults import divergence
from training.faults.divergence import Diverged
from training.faults.stopping import Stopped, StopRequest
from training.plan import DEFAULT_LARGEST_MICRO_BATCH, Every, Plan
from training.state import Place, State
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
        config.compression, config.precision == "mixed_float16", config.fusion_mb)
    try:
        exchange.build(optimizer, model.trainable_variables)
    except ValueError as error:
        raise UserError(f"--lars_exclude: {error}") from None
    return optimizer


def make_state(config, model, optimizer) -> State:
    norms = LayerNorms(optimizer, model.trainable_variables) if config.log_trust_ratios else None
    return State(model, optimizer, Totals(), norms)


def make_evaluator(config, model, feed) -> Evaluator:
    return Evaluator(model, feed, config.micro_batch_size or DEFAULT_LARGEST_MICRO_BATCH)


class Fit:
    """A training under way on the workers that there are.

    checkpoints, observers: rank 0's alone. commit: called every few steps, on all workers at once.
    """

    def __init__(self, config, plan: Plan, feed: Feed, state: State, checkpoints: Checkpoints | None = None,
                 observers=(), stop: StopRequest | None = None, commit: Callable = lambda: None):
        self._config, self._plan, self._feed, self._state = config, plan, feed, state
        self._checkpoints, self._observers, self._commit = checkpoints, observers, commit
        self._stop, self._every = stop or StopRequest(), Every.parse(config.checkpoint_every)
        self._evaluate = make_evaluator(config, state.model, feed)
        self._exact = ExactStatistics(state.model) if config.batch_norm_statistics == "exact" else None
        self._steps, self._names = {}, [v.name.split(":")[0] for v in state.model.trainable_variables]
        self._began = time.perf_counter() - state.place.seconds
        self._saved = plan.position(state.place.step), time.monotonic()
        self._reported, self._shares = (state.place.samples, state.place.trained_seconds), Shares()

    def run(self) -> dict:
        """Trains through what is left of the plan; returns summary.json's content.

        Raises Stopped after a request to stop, UserError where training cannot go on.
        """
        self._stop.heeded = True
        if self._config.on_divergence == "rollback" and not self._state.place.step:
            self._save(epoch=0)
        while True:
            try:
                validation = self._follow_plan()
                break
            except Diverged as problem:
                self._roll_back(problem)
        workers.check_same_weights(self._state.model.variables)
        place = self._place()
        return summary(validation, self._plan.train_samples, self._plan.epochs,
                       self._plan.phases[-1].global_batch_size, place.samples / place.trained_seconds, place.seconds)

    def _follow_plan(self) -> dict:
        """The last evaluation of the plan, after all that comes before it."""
        evaluations, validation = 0, None
        for interval in self._plan.intervals():
            if self._state.place.step < interval.end:
                self._train(interval)
            if interval.epoch is None:
                continue
            evaluations += 1
            if evaluations > self._state.place.evaluations:
                validation = self._validate(interval)
        return validation or self._evaluate()

    def _train(self, interval):
        place, batch_size, began = self._state.place, interval.phase.global_batch_size, time.perf_counter()
        place.piece_step = max(place.piece_step, interval.first_step)
        first = place.step
        with self._feed.train(interval.position(place.piece_step) + place.skipped, interval.end - place.piece_step,
                              batch_size, interval.phase.micro_batch_size, skip=first - place.piece_step) as batches:
            while place.step < interval.end:
                stop, due, waited = self._update(interval, batches,
                                                 read=(place.step - first) * batch_size // hvd.size())
                for observer in self._observers:
                    observer.step(batch_size, self._layers() if not place.step else {})
                place.step += 1
                place.samples += batch_size
                seconds, began = time.perf_counter() - began, time.perf_counter()
                place.trained_seconds += seconds
                self._shares.add(seconds, waited)
                if stop:
                    self._stop_here()
                if place.step < interval.end or interval.epoch is None:
                    self._keep(due or self._is_due())

    def _update(self, interval, batches, read: int) -> tuple[bool, bool, list[float]]:
        """One update; whether a worker has asked to stop, whether it is time for a checkpoint, clock's seconds waited.

        read: this worker's samples in `batches` before. Raises Diverged on all workers, UserError for bad data.
        """
        plan, step = self._plan, self._state.place.step
        epoch = interval.position(step) / plan.train_samples
        rate, momentum = plan.learning_rate(epoch), plan.momentum_of(interval.phase)
        try:
            learned = self._step(interval.phase.accumulation_steps)(
                batches.iterator, tf.constant(rate, tf.float32), tf.constant(momentum, tf.float32), self._flags())
        except tf.errors.OpError as error:
            if workers.is_lost(error):
                raise
            why = workers.input_reason(error, batches, read)
            raise UserError(f"training stopped at epoch {epoch:.3f}: {why}") from None
        flags, loss, squares, waited = (tensor.numpy() for tensor in learned)
        reason = divergence.reason(float(loss), squares, self._names, len(self._feed.dataset.classes),
                                   self._config.precision == "mixed_float16")
        if reason:
            raise Diverged(reason, step, epoch, rate)
        return flags[0] > 0, flags[1] > 0, waited.tolist()

    def _flags(self):
        """What this worker tells the others at a step: whether it is to stop, whether it is time for a checkpoint."""
        due = self._checkpoints is not None and self._every.has_passed(time.monotonic() - self._saved[1])
        return tf.constant([self._stop.received, due], tf.float32)

    def _step(self, accumulation_steps):
        """The compiled update for so many micro-batches, made once."""
        if accumulation_steps not in self._steps:
            self._steps[accumulation_steps] = make_train_step(
                self._state.model, self._state.optimizer, self._state.totals, accumulation_steps,
                self._config.label_smoothing, self._config.xla, moving_statistics=not self._exact,
                norms=self._state.norms)
        return self._steps[accumulation_steps]

    def _layers(self) -> dict:
        return self._state.norms.collect() if self._state.norms else {}

    def _validate(self, interval):
        phase, place, plan = interval.phase, self._state.place, self._plan
        if self._exact:
            self._exact.measure(self._feed, interval.position(interval.end) + place.skipped, phase.global_batch_size,
                                phase.micro_batch_size)
        validation = self._evaluate(lambda: workers.any_of_them(self._stop.received))
        if validation is None:
            self._stop_here()
        row = _row(plan, interval.epoch, place.samples, self._state.totals.collect(), validation)
        place = self._place()
        (samples, seconds), self._reported = self._reported, (place.samples, place.trained_seconds)
        speed = (place.samples - samples) / (place.trained_seconds - seconds) if place.samples > samples else 0.0
        row |= {"images_per_second": speed, "seconds": place.seconds}
        shares = self._shares.collect()
        with workers.together():
            for observer in self._observers:
                observer.evaluation(row, self._layers(), shares)
        place.evaluations += 1
        last = place.step == plan.steps
        due = last or self._is_due() or workers.any_of_them(bool(self._flags()[1]))
        self._keep(due, interval.epoch, validation["val_top1"])
        with workers.together():
            if last and self._checkpoints and not self._checkpoints.wait():
                raise UserError("the last checkpoint could not be written; make room and start the same command again")
        return validation

    def _place(self) -> Place:
        self._state.place.seconds = time.perf_counter() - self._began
        return self._state.place

    def _is_due(self) -> bool:
        position = self._plan.position(self._state.place.step)
        return self._every.is_due(self._saved[0], position, self._plan.train_samples)

    def _keep(self, due: bool, epoch=None, top1=None):
        """After a step or an evaluation: a checkpoint where one is due; and what elastic training goes back to."""
        if due:
            self._save(epoch, top1)
        self._commit()

    def _save(self, epoch=None, top1=None):
        self._place()
        snapshot, position = self._state.snapshot(), self._plan.position(self._state.place.step)
        self._saved = position, time.monotonic()
        if self._checkpoints:
            self._checkpoints.save(snapshot, position / self._plan.train_samples if epoch is None else epoch, top1)

    def _stop_here(self):
        """Raises Stopped when the checkpoint is written."""
        self._save()
        with workers.together():
            if self._checkpoints and not self._checkpoints.wait():
                raise UserError("asked to stop, but the checkpoint could not be written")
        raise Stopped(f"stopped on request after step {self._state.place.step} of {self._plan.steps}, with a "
                      "checkpoint written")

    def _roll_back(self, problem: Diverged):
        """Goes back to the last checkpoint, and on with the data that come after those of the problem."""
        place, allowed = self._state.place, self._config.max_rollbacks
        with workers.together():
            newest = self._checkpoints and self._checkpoints.last_good(place.step)
        newest = hvd.broadcast_object(str(newest or ""), name="newest")
        if self._config.on_divergence != "rollback" or place.rollbacks >= allowed or not newest:
            tried = f", after {place.rollbacks} rollbacks" if place.rollbacks else ""
            raise workers.AgreedError(f"{problem}{tried}; the last good checkpoint: {newest or 'none'}; try a lower "
                                      "--learning_rate or a longer --warmup_epochs")
        rollbacks, past = place.rollbacks + 1, self._plan.position(place.step + 1) + place.skipped
        with workers.together():
            snapshot = self._checkpoints and self._checkpoints.load(self._state.variables)
        self._state.broadcast(snapshot)
        place = self._state.place
        place.rollbacks, place.piece_step = rollbacks, place.step
        place.skipped = past - self._plan.position(place.step)
        for observer in self._observers:
            observer.go_back(place)
        self._reported = place.samples, place.trained_seconds
        self._saved = self._plan.position(place.step), time.monotonic()
        if self._checkpoints:
            complain(f"{problem}; rolled back to {newest} ({rollbacks} of {allowed}), past the data that did it")


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
