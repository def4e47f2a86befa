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
from model_zoo.layers import masks_at
from optim.lars import SGD
from optim.stacks import Scaled, norms_of
from training.batch_norm import MICRO_BATCH, MovingStatistics, Span, flat_statistics
from training.clock import Clock, marks
from training.layer_statistics import LayerStatistics
from training.losses import rivals_of, training_loss
from training.state import Totals

NO_SIGNALS = (0.0, 0.0)


class Terms(NamedTuple):
    """What the micro-batches of an update are added up to, float32. The same structure holds the shapes.

    gradients: of the mean loss, for each variable. results: sums of loss and top-1 hits, and the number of samples,
    (3,). statistics: batch norm's, as flat_statistics returns them, or empty if none move. squares: the squared norm of
    each variable's gradient, or empty.
    """

    gradients: Any
    results: Any
    statistics: Any
    squares: Any


class StepResult(NamedTuple):
    """The result of a step, as tensors in its graph and as arrays on the host. The same structure holds the shapes.

    All except `waited` are the same on all workers. signals: their sum over the workers. means: loss and top-1 over the
    global batch. norms: of the averaged gradients. squares: mean over the micro-batches of the squared norm of each
    variable's gradient, or empty. waited: seconds that this worker has waited for each of activity.WAITS, or zeros if
    the step was not timed.
    """

    signals: Any
    means: Any
    norms: Any
    squares: Any
    waited: Any

    @classmethod
    def shapes(cls, variables: int, measures_noise: bool = False) -> "StepResult":
        """Returns the shapes for a number of trainable variables."""
        return cls((len(NO_SIGNALS),), (2,), (variables,), (variables * measures_noise,), (len(WAITS),))

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
class TrainStep:
    """What an update of the weights consists of.

    totals: sums the training's loss and hits. accumulation_steps: number of micro-batches of this worker. own: which of
    the global batch these are. Default: the first ones. micro_batches: number in the global batch. Default: as many on
    each worker. exact: whether sums over them have the same bits in any order (distributed.fixed_point). loss: value of
    --loss. clip_norm: see `clipped`. xla: whether XLA compiles the forward and backward pass, and the update. moving:
    batch norm's moving statistics, to move with each update. layers: records norms and trust ratios. span: of batch
    norm's statistics, applied when the step is traced. after_update: called in the graph after the update.
    measures_noise: whether it measures what training.noise_scale needs.
    """

    model: tf.keras.Model
    optimizer: tf.keras.optimizers.Optimizer
    exchange: GradientExchange
    totals: Totals
    accumulation_steps: int = 1
    own: range | None = None
    micro_batches: int | None = None
    exact: bool = False
    loss: str = "cross_entropy"
    label_smoothing: float = 0.0
    clip_norm: float = 0.0
    xla: bool = False
    moving: MovingStatistics | None = None
    layers: LayerStatistics | None = None
    span: Span = MICRO_BATCH
    after_update: Callable[[], None] | None = None
    measures_noise: bool = False


def make_train_step(parts: TrainStep):
    """Returns a function of (iterator over micro-batches, learning rate, momentum, timed, position, signals, records).

    It is one update. It returns StepResult.packed. timed: whether to measure waiting times, bool, on the host.
    position: that of the global batch's first sample in the stream, int64, on which the masks of dropout depend.
    records: whether to record the statistics of the layers, bool, on the host.
    Results and batch norm's statistics are summed over the workers in one message. Gradients and these are divided by
    the number of micro-batches after they are summed.
    """
    optimizer, exchange, moving = parts.optimizer, parts.exchange, parts.moving
    variables = parts.model.trainable_variables
    shapes = Terms([variable.shape for variable in variables], tf.TensorShape(3),
                   tf.TensorShape(moving.size if moving else 0),
                   tf.TensorShape(len(variables) if parts.measures_noise else 0))
    micro_batches = parts.micro_batches or parts.accumulation_steps * exchange.workers
    form, other_form = FLOAT32, FLOAT32
    if parts.exact:
        form, other_form = FixedPoint(micro_batches), FixedPoint.lossless(micro_batches)
    forms = Terms([form] * len(variables), other_form, other_form, other_form)
    terms_of = accumulated(make_micro_batch(parts), shapes, parts.accumulation_steps, forms)

    @tf.function(autograph=False)
    def step(iterator, learning_rate, momentum, timed=False, position=0, signals=NO_SIGNALS, records=True):
        clock = Clock(tf.convert_to_tensor(timed))
        terms, lap = terms_of(iterator, position, clock.start(learning_rate), clock)
        gradients, norms = average(exchange, optimizer, terms.gradients, variables, micro_batches, form)
        lap = clock.exchanged([gradient.tensor for gradient in gradients], lap)
        if parts.layers:
            tf.cond(tf.convert_to_tensor(records), lambda: parts.layers.record(norms), lambda: None)
        assign_rates(optimizer, learning_rate, momentum)
        updates = inner(optimizer).iterations.read_value()
        is_updated = apply(optimizer, gradients, norms, variables, parts.clip_norm, parts.xla)
        summed = exchange.sum([other_form.term(tf.convert_to_tensor(signals)), *terms[1:]], "results")
        signals, results, statistics, squares = map(other_form.total, summed, ([len(NO_SIGNALS)], *shapes[1:]))
        parts.totals.add(results)
        if moving:
            moving.move(statistics / micro_batches, updates, is_updated)
        if parts.after_update:
            parts.after_update()
        return StepResult(signals, results[:2] / results[2], norms, squares / micro_batches, lap.waited).packed()

    return step


def make_micro_batch(parts: TrainStep):
    """Returns a function of (number of the micro-batch, iterator, position, lap, clock), which returns (Terms, lap).

    number: from this worker's first. position: of the global batch. lap: to the end of the previous micro-batch.
    """
    model, optimizer, variables = parts.model, parts.optimizer, parts.model.trainable_variables
    own = parts.own or range(parts.accumulation_steps)
    marked = marks()

    @tf.function(jit_compile=parts.xla, reduce_retracing=True, autograph=False)
    def backward(images, labels, position, rows=None):
        with tf.GradientTape() as tape, parts.span.applied_to(model) as observed, masks_at(model, position):
            logits = model(images if rows is None else mixing.mixed(images, rows), training=True)
            losses = training_loss(parts.loss, logits, labels, parts.label_smoothing, rows)
            loss = scale(optimizer, tf.reduce_mean(losses))
        return tape.gradient(loss, variables), flat_statistics(observed if parts.moving else {}), losses, logits

    def micro_batch(number, iterator, position, lap, clock):
        (images, labels, *rows), lap = clock.arrived(marked.next_of(iterator, lap), lap)
        labels = tf.squeeze(labels, 1)
        samples = tf.shape(labels, tf.int64)[0]
        position += samples * tf.cast(own.start + own.step * number, tf.int64)
        gradients, statistics, losses, logits = backward(images, labels, position, *rows)
        if rows:  # top-1 counts the label with the larger weight
            labels = tf.where(mixing.label_weight(*rows) < 0.5, mixing.partners(labels), labels)
        hits = tf.cast(rivals_of(tf.cast(logits, tf.float32), labels) < 1, tf.float32)
        results = tf.stack([tf.reduce_sum(losses), tf.reduce_sum(hits), tf.cast(samples, tf.float32)])
        squares = tf.zeros([0])
        if parts.measures_noise:
            squares = tf.square(norms_of(gradients) / scale(optimizer, tf.constant(1.0)))
        marked.set_computed(gradients)
        return Terms(gradients, results, statistics, squares), clock.computed(gradients, lap)

    return micro_batch


def accumulated(micro_batch, shapes: Terms, accumulation_steps: int, forms: Terms):
    """Returns a function that runs `micro_batch` accumulation_steps times and adds its terms, as their forms add them.

    It replaces Horovod's backward_passes_per_step, so that the number of steps can change and an update is one
    iteration of the optimizer. All micro-batches except the last run in a loop. The last runs after the loop, so that
    its gradients are exchanged while the rest of its backward pass runs.
    """
    def terms_of(number, iterator, position, lap, clock):
        terms, lap = micro_batch(number, iterator, position, lap, clock)
        return tf.nest.map_structure(lambda form, term: form.term(term), forms, terms), lap

    def summed(iterator, position, lap, clock):
        def added(number, partial, lap):
            terms, lap = terms_of(number, iterator, position, lap, clock)
            return number + 1, tf.nest.map_structure(lambda a, b: a + b, partial, terms), lap

        zero = tf.nest.map_structure(lambda form, shape: form.zero(shape), forms, shapes)
        number, partial, lap = tf.while_loop(lambda number, *_: number < accumulation_steps - 1, added,
                                             (tf.constant(0), zero, lap))
        _, partial, lap = added(number, partial, lap)
        return partial, lap

    return functools.partial(terms_of, 0) if accumulation_steps == 1 else summed


def average(exchange: GradientExchange, optimizer, gradients, variables, count: int,
            form: Float32 | FixedPoint = FLOAT32) -> tuple[list[Scaled], tf.Tensor]:
    """Sums the gradients over the workers in one exchange, divides by `count` and unscales. Returns also their norms.

    gradients: sums over this worker's micro-batches, as `form` represents them. count: number of micro-batches that the
    sums over all workers contain. norms: float32 (gradients,). No gradient is multiplied: the count, the loss scale and
    the scales of compressed gradients are one factor of each. An overflow on one worker makes the sum, and so the norm,
    infinite or NaN on all of them.
    """
    totals, factors, norms = exchange.sums(gradients, variables, count, inner(optimizer).wire_scales, form)
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
    their moments by a correction for more updates than these contain. An optimizer that is not ours gets tensors.
    """
    if clip_norm:
        gradients = clipped(gradients, norms, clip_norm)
    wrapped = inner(optimizer)  # in Horovod's DistributedOptimizer, whose apply_gradients leaves the exchange to us

    def update():
        ours = gradients if isinstance(wrapped, SGD) else [gradient.value for gradient in gradients]
        wrapped.apply_gradients([*zip(ours, variables, strict=True)])

    if xla:
        update = tf.function(update, jit_compile=True, autograph=False)
    if not has_dynamic_scale(optimizer):
        update()
        return True
    _, is_finite = optimizer._loss_scale.update([norms])
    tf.cond(is_finite, update, lambda: None)
    return is_finite
