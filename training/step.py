"""One update of the weights: the micro-batches of this worker, one exchange of gradients, one step of the optimizer.

A loss scale skips the update if a gradient is not finite, on all workers.
"""
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from common.activity import WAITS
from data import mixing
from distributed.exchange import GradientExchange
from distributed.fixed_point import FLOAT32, FixedPoint, Float32
from distributed.optimizer import LossScaleOptimizer, assign_rates, has_dynamic_scale, inner, scale
from model_zoo.layers import masks_at, trained_variables
from optim import info_of
from optim.stacks import Scaled, norms_of
from training.batch_norm import MICRO_BATCH, MovingStatistics, Span, flat_statistics
from training.clock import Clock, batch_counts, on_host
from training.layer_statistics import LayerStatistics
from training.losses import cross_entropy, label_ranks
from training.state import Totals


class Signals(NamedTuple):
    """What a worker tells the others in a step, or what any of them has told."""

    stop: bool = False  # whether the worker has been asked to stop
    can_save: bool = False  # whether it can save a checkpoint that is due by time, or that was postponed

    def __or__(self, others: "Signals") -> "Signals":
        """Returns the signals that either has set."""
        return Signals(*(bool(one or other) for one, other in zip(self, others, strict=True)))


NO_SIGNALS = Signals()


class StepInput(NamedTuple):
    """The input of a step besides its data: tensors on the host. With a Python number, each value would be traced."""

    learning_rate: tf.Tensor  # float32
    momentum: tf.Tensor  # float32
    timed: tf.Tensor  # bool: whether to measure the waiting times
    position: tf.Tensor  # int64: of the global batch's first sample in the stream; the masks of dropout depend on it
    signals: tf.Tensor  # float32 (2,): this worker's Signals, 0 or 1
    records_layers: tf.Tensor  # bool: whether to record the statistics of the layers

    @classmethod
    def of(cls, learning_rate: float, momentum: float, timed: bool = False, position: int = 0,
           signals: Signals = NO_SIGNALS, records_layers: bool = True) -> "StepInput":
        """Returns the input with these values."""
        return cls(on_host(learning_rate, tf.float32), on_host(momentum, tf.float32), on_host(timed, tf.bool),
                   on_host(position, tf.int64), on_host([*signals], tf.float32), on_host(records_layers, tf.bool))


class Terms(NamedTuple):
    """What the micro-batches of an update are added up to, float32. The same structure holds the shapes."""

    gradients: Any  # of the mean loss, for each variable
    results: Any  # sums of loss and top-1 hits, and the number of samples, (3,)
    statistics: Any  # batch norm's, as flat_statistics returns them, or empty if none move
    squares: Any  # squared norm of each variable's gradient, (variables,), or empty


class StepResult(NamedTuple):
    """The result of a step, as tensors in its graph and as arrays on the host. The same structure holds the shapes.

    All except `waited` are the same on all workers.
    """

    signals: Any  # number of workers that have set each of Signals
    means: Any  # loss and top-1 over the global batch. Those of metrics.jsonl come from training.state.Totals instead
    norms: Any  # of the averaged gradients, (variables,)
    squares: Any  # mean over the micro-batches of each gradient's squared norm, (variables,), or empty
    waited: Any  # seconds that this worker has waited for each of activity.WAITS, or zeros if the step was not timed

    @classmethod
    def shapes(cls, variables: int, measures_noise: bool = False) -> "StepResult":
        """Returns the shapes for a number of trainable variables."""
        return cls((len(Signals._fields),), (2,), (variables,), (variables * measures_noise,), (len(WAITS),))

    def packed(self) -> tf.Tensor:
        """Returns one vector, float32, which a single copy brings to the host."""
        return tf.concat([tf.cast(part, tf.float32) for part in self], axis=0)

    @classmethod
    def unpacked(cls, vector: np.ndarray, shapes: "StepResult") -> "StepResult":
        """Returns the parts of what `packed` returned, on the host."""
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        return cls(*np.split(vector, ends[:-1]))

    @property
    def loss(self) -> float:
        return float(self.means[0])

    @property
    def top1(self) -> float:
        return float(self.means[1])


@dataclass(frozen=True)
class StepParts:
    """What make_train_step builds a step from."""

    model: tf.keras.Model
    optimizer: tf.keras.optimizers.Optimizer  # as distributed.optimizer.wrap returns it
    exchange: GradientExchange
    totals: Totals  # sums of the training's loss and hits, to which the step adds
    own: range = range(1)  # numbers of this worker's micro-batches in the global batch
    micro_batches: int | None = None  # in the global batch. Default: as many on each worker
    exact: bool = False  # whether sums over them have the same bits in any order (distributed.fixed_point)
    loss: Callable = cross_entropy  # of logits, labels and rows of data.mixing, as training.losses.make_loss returns it
    clip_norm: float = 0.0  # see `clipped`
    freeze: bool = False  # whether the last layer alone is trained, and the others run as in evaluation
    xla: bool = False  # whether XLA compiles the forward and backward pass, and the update
    moving: MovingStatistics | None = None  # batch norm's moving statistics, to move with each update
    layers: LayerStatistics | None = None  # records norms and trust ratios
    span: Span = MICRO_BATCH  # samples of batch norm's statistics, applied when the step is traced
    after_update: Callable[[], None] | None = None  # called in the graph after the update
    measures_noise: bool = False  # whether the step measures what training.noise_scale needs

    @property
    def variables(self) -> list[tf.Variable]:
        """Those that are trained."""
        return trained_variables(self.model, self.freeze)


def make_train_step(parts: StepParts):
    """Returns one update as a compiled function of (iterator over micro-batches, StepInput).

    It returns StepResult.packed. Results and batch norm's statistics are summed over the workers in one message.
    Gradients and these are divided by the number of micro-batches after they are summed.
    """
    optimizer, exchange, moving = parts.optimizer, parts.exchange, parts.moving
    variables = parts.variables
    shapes = Terms([variable.shape for variable in variables], tf.TensorShape(3),
                   tf.TensorShape(moving.size if moving else 0),
                   tf.TensorShape(len(variables) if parts.measures_noise else 0))
    micro_batches = parts.micro_batches or len(parts.own) * exchange.workers
    form, other_form = FLOAT32, FLOAT32  # of sums over workers: of the gradients, and of all else
    if parts.exact:
        form, other_form = FixedPoint(micro_batches), FixedPoint.lossless(micro_batches)
    groups = exchange.groups(variables, form)
    micro_batch = make_micro_batch(parts)

    def represented(*given):
        terms, timing = micro_batch(*given)
        return Terms(form.terms(terms.gradients, groups), *map(other_form.term, terms[1:])), timing

    def nothing() -> Terms:
        return Terms(form.zeros(shapes.gradients, groups), *map(other_form.zero, shapes[1:]))

    terms_of = accumulated(represented, nothing, len(parts.own))

    @tf.function(autograph=False)
    def step(iterator, given: StepInput):
        clock = Clock(given.timed)
        terms, timing = terms_of(iterator, given.position, clock.start(given.learning_rate), clock)
        gradients, norms = average(exchange, optimizer, terms.gradients, variables, micro_batches, form)
        timing = clock.exchanged([gradient.tensor for gradient in gradients], timing)
        if parts.layers:
            tf.cond(given.records_layers, lambda: parts.layers.record(norms), lambda: None)
        assign_rates(optimizer, given.learning_rate, given.momentum)
        updates = inner(optimizer).iterations.read_value()
        summed = exchange.sum([other_form.term(given.signals), *terms[1:]], "results")
        is_updated = apply(optimizer, gradients, norms, variables, parts.clip_norm, parts.xla)
        signals, results, statistics, squares = map(other_form.total, summed, ([len(Signals._fields)], *shapes[1:]))
        parts.totals.add(results)
        if moving:
            moving.move(statistics / micro_batches, updates, is_updated)
        if parts.after_update:
            parts.after_update()
        return StepResult(signals, results[:2] / results[2], norms, squares / micro_batches, timing.waited).packed()

    return step


def make_micro_batch(parts: StepParts):
    """Returns a function of (index, iterator, position, timing, clock), which returns (Terms, timing).

    It computes one of this worker's micro-batches. index: in parts.own. position: of the global batch in the stream.
    timing: up to the end of the previous micro-batch.
    """
    model, optimizer, variables = parts.model, parts.optimizer, parts.variables
    counts = batch_counts()

    @tf.function(jit_compile=parts.xla, reduce_retracing=True, autograph=False)
    def backward(images, labels, position, rows=None):
        with tf.GradientTape(watch_accessed_variables=False) as tape, parts.span.applied_to(model) as observed, \
                masks_at(model, position):
            tape.watch(variables)  # the tape records nothing before the first layer that is trained
            logits = model(images if rows is None else mixing.mixed(images, rows), training=not parts.freeze)
            losses = parts.loss(logits, labels, rows)
            loss = scale(optimizer, tf.reduce_mean(losses))
        return tape.gradient(loss, variables), flat_statistics(observed if parts.moving else {}), losses, logits

    def micro_batch(index, iterator, position, timing, clock):
        (images, labels, *rows), timing = clock.arrived(counts.next_of(iterator, timing), timing)
        labels = tf.squeeze(labels, 1)
        samples = tf.shape(labels, tf.int64)[0]
        position += samples * tf.cast(parts.own.start + parts.own.step * index, tf.int64)
        gradients, statistics, losses, logits = backward(images, labels, position, *rows)
        if rows:  # top-1 counts the label with the larger weight
            labels = tf.where(mixing.label_weight(*rows) < 0.5, mixing.partners(labels), labels)
        hits = tf.cast(label_ranks(tf.cast(logits, tf.float32), labels) < 1, tf.float32)
        results = tf.stack([tf.reduce_sum(losses), tf.reduce_sum(hits), tf.cast(samples, tf.float32)])
        squares = tf.zeros([0])
        if parts.measures_noise:
            squares = tf.square(norms_of(gradients) / scale(optimizer, tf.constant(1.0)))
        counts.set_computed(gradients)
        return Terms(gradients, results, statistics, squares), clock.computed(gradients, timing)

    return micro_batch


def accumulated(micro_batch, nothing: Callable[[], Terms], accumulation_steps: int):
    """Returns a function that runs `micro_batch` accumulation_steps times and adds its terms to those of `nothing`.

    It replaces Horovod's backward_passes_per_step, so that the number of steps can change and an update is one
    iteration of the optimizer. All micro-batches except the last run in a loop. The last runs after the loop, so that
    its gradients are exchanged while the rest of its backward pass runs.
    """
    def summed(iterator, position, timing, clock):
        def added(index, partial, timing):
            terms, timing = micro_batch(index, iterator, position, timing, clock)
            return index + 1, tf.nest.map_structure(lambda a, b: a + b, partial, terms), timing

        index, partial, timing = tf.while_loop(lambda index, *_: index < accumulation_steps - 1, added,
                                               (tf.constant(0), nothing(), timing))
        return added(index, partial, timing)[1:]

    return functools.partial(micro_batch, 0) if accumulation_steps == 1 else summed


def average(exchange: GradientExchange, optimizer, gradients, variables, count: int,
            form: Float32 | FixedPoint = FLOAT32) -> tuple[list[Scaled], tf.Tensor]:
    """Sums the gradients over the workers in one exchange, divides by `count` and unscales. Returns also their norms.

    gradients: sums over this worker's micro-batches, as `form` represents them. count: number of micro-batches that the
    sums over all workers contain. norms: float32 (gradients,). No gradient is multiplied: the count, the loss scale and
    the scales of compressed gradients are one factor of each. An overflow on one worker makes the sum, and so the norm,
    infinite or NaN on all of them.
    """
    totals, factors, norms = exchange.sums(gradients, variables, count, form)
    if isinstance(optimizer, LossScaleOptimizer):
        factors /= optimizer.loss_scale
    norms *= factors
    parts = zip(totals, tf.unstack(factors, len(totals)), tf.unstack(norms, len(totals)), strict=True)
    return [Scaled(*part) for part in parts], norms


def clipped(gradients: list[Scaled], norms: tf.Tensor, clip_norm: float) -> list[Scaled]:
    """Returns the gradients, scaled so that the L2 norm of all of them together is at most clip_norm (arXiv:1211.5063).

    norms: of the gradients, float32 (gradients,).
    """
    share = tf.minimum(1.0, clip_norm / tf.norm(norms))
    return [Scaled(gradient.tensor, gradient.factor * share, gradient.norm * share) for gradient in gradients]


def apply(optimizer, gradients: list[Scaled], norms: tf.Tensor, variables, clip_norm: float = 0.0, xla: bool = False
          ) -> bool | tf.Tensor:
    """Updates the variables, or skips the update and lowers the loss scale if a norm is not finite.

    Returns whether it has updated them. gradients, norms: of `average`. clip_norm: see `clipped`; 0: they are not
    clipped. xla: whether XLA compiles the update as one unit. Keras's LossScaleOptimizer would test each element of
    each gradient, and count a skipped update as one of the optimizer's `iterations`: Adam and LAMB would then divide
    their moments by a correction for more updates than these contain. An optimizer that does not take Scaled
    gets tensors.
    """
    if clip_norm:
        gradients = clipped(gradients, norms, clip_norm)
    wrapped = inner(optimizer)  # in Horovod's DistributedOptimizer, whose apply_gradients leaves the exchange to us

    def update():
        ours = gradients if info_of(wrapped).takes_scaled else [gradient.value for gradient in gradients]
        wrapped.apply_gradients([*zip(ours, variables, strict=True)])

    if xla:
        update = tf.function(update, jit_compile=True, autograph=False)
    if not has_dynamic_scale(optimizer):
        update()
        return True
    _, is_finite = optimizer._loss_scale.update([norms])
    tf.cond(is_finite, update, lambda: None)
    return is_finite
