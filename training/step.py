"""One update: gradients summed over the micro-batches, one exchange, one optimizer step."""
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from data import mixing
from distributed import optimizer as distributed
from distributed import tree
from model_zoo.layers import masks_at
from optim.stacks import norms_of
from training import weight_check
from training.batch_norm import MICRO_BATCH, MovingStatistics, Span, flat_statistics
from training.breakdown import NAMES, Clock

NO_SIGNALS = (0.0, 0.0)


@dataclass(frozen=True)
class StepResult:
    """The results of a step. All except `waited` are the same on all workers.

    signals: their sum over the workers. loss, top1: means over the global batch. digits: of the weights after a timed
    step, summed over the workers (weight_check.differ). norms: of the averaged gradients. squares: mean over the
    micro-batches of the squared norm of each variable's gradient, or empty. waited: seconds that this worker has waited
    for each of breakdown.NAMES, or zeros if the step was not timed.
    """

    signals: np.ndarray
    loss: float
    top1: float
    digits: np.ndarray
    norms: np.ndarray
    squares: np.ndarray
    waited: np.ndarray

    @classmethod
    def unpack(cls, packed: np.ndarray, has_squares: bool = False) -> "StepResult":
        """Unpacks the result of a step. packed: on the host. has_squares: whether TrainStep.measures_noise."""
        first, second = len(NO_SIGNALS), len(NO_SIGNALS) + 2
        signals, results, digits, norms, waited = np.split(
            packed, [first, second, second + 2 * weight_check.DIGITS, -len(NAMES)])
        norms, squares = np.split(norms, [len(norms) // 2 if has_squares else len(norms)])
        return cls(signals, *map(float, results), digits, norms, squares, waited)


class Totals:
    """Sums over the samples since they were last collected: loss, top-1 hits, samples. The same on all workers."""

    def __init__(self):
        self.variable = tf.Variable(tf.zeros(3, tf.float64), trainable=False, name="totals")

    def add(self, results: tf.Tensor) -> None:
        """Adds an update. results: sums over its global batch, float32 (3,)."""
        self.variable.assign_add(tf.cast(results, tf.float64))

    def collect(self) -> dict[str, float]:
        """Returns loss and top1 (means) and samples, and starts again."""
        loss, top1, samples = self.variable.numpy().tolist()
        self.variable.assign(tf.zeros_like(self.variable))
        return {"loss": loss / samples, "top1": top1 / samples, "samples": int(samples)}


def rivals_of(logits, labels) -> tf.Tensor:
    """Returns how many other classes have a logit at least as large as that of the label, float32 (batch,).

    The label is among the k largest logits if there are fewer than k rivals. So ties count as misses; with
    tf.math.in_top_k, a network with constant logits would always be right. With a NaN, all classes are rivals.
    """
    own = tf.gather(logits, labels[:, None], batch_dims=1)
    smaller = tf.reduce_sum(tf.cast(logits < own, tf.float32), axis=1)
    rivals = logits.shape[-1] - 1 - smaller
    return tf.where(tf.reduce_any(tf.math.is_nan(logits), axis=1), float(logits.shape[-1]), rivals)


def cross_entropy(logits, labels, label_smoothing: float):
    """Returns the loss of each sample, float32 (batch,).

    Label smoothing follows arXiv:1512.00567, section 7: the target is 1 - e + e / classes for the label and e / classes
    for any other class.
    """
    logits = tf.cast(logits, tf.float32)
    if not label_smoothing:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    targets = tf.one_hot(labels, logits.shape[-1]) * (1 - label_smoothing) + label_smoothing / logits.shape[-1]
    return tf.nn.softmax_cross_entropy_with_logits(targets, logits)


class LayerStatistics:
    """The norms of each variable and of its gradient at the last update, and the LARS trust ratio if there is one.

    The ratio of an excluded variable is 1.
    """

    def __init__(self, optimizer, variables):
        self._optimizer, self._variables = distributed.inner(optimizer), variables
        self.variable = tf.Variable(tf.zeros([len(variables), 3]), trainable=False, name="norms")

    def record(self, gradient_norms) -> None:
        """Records an update before it is applied. gradient_norms: of gradients averaged over the workers and unscaled.
        """
        weight_norms = norms_of(self._variables)
        ratios = tf.ones_like(weight_norms)
        if hasattr(self._optimizer, "trust_ratios"):
            excluded = [self._optimizer.is_excluded(variable) for variable in self._variables]
            ratios = tf.where(excluded, ratios, self._optimizer.trust_ratios(weight_norms, gradient_norms))
        self.variable.assign(tf.stack([weight_norms, gradient_norms, ratios], axis=1))

    def collect(self) -> dict[str, list[float]]:
        """Returns variable -> [weight norm, gradient norm, trust ratio]. The names are the same in every process."""
        return dict(zip(names_alone(self._variables), self.variable.numpy().tolist(), strict=True))


def names_alone(variables) -> list[str]:
    """Returns the names that the variables of a model have in a process that builds no other model.

    Keras counts the layers of each kind in a process, not in a model: conv2d, conv2d_1, and so on.
    """
    pattern = re.compile(r"(.*?)(?:_([0-9]+))?((?:/.*)?)")
    found = [pattern.fullmatch(variable.name.split(":")[0]).groups() for variable in variables]
    counts = {}
    for kind, count, _ in found:
        counts.setdefault(kind, set()).add(int(count or 0))
    order = {kind: sorted(seen) for kind, seen in counts.items()}
    numbered = [(kind, order[kind].index(int(count or 0)), rest) for kind, count, rest in found]
    return [f"{kind}_{number}{rest}" if number else f"{kind}{rest}" for kind, number, rest in numbered]


@dataclass(frozen=True)
class TrainStep:
    """What an update of the weights consists of.

    totals: sums the training's loss and hits. accumulation_steps: number of micro-batches of this worker. own: which of
    the global batch these are. Default: the first ones. micro_batches: number in the global batch. Default: as many on
    each worker. in_tree: whether sums over them have the order of distributed.tree. xla: whether XLA compiles the
    forward and backward pass. moving: batch norm's moving statistics, to move with each update. layers: records norms
    and trust ratios. span: of batch norm's statistics, applied when the step is traced. after_update: called in the
    graph after the update. measures_noise: whether it measures what training.noise_scale needs.
    """

    model: tf.keras.Model
    optimizer: tf.keras.optimizers.Optimizer
    totals: Totals
    accumulation_steps: int = 1
    own: range | None = None
    micro_batches: int | None = None
    in_tree: bool = False
    label_smoothing: float = 0.0
    xla: bool = False
    moving: MovingStatistics | None = None
    layers: LayerStatistics | None = None
    span: Span = MICRO_BATCH
    after_update: Callable[[], None] | None = None
    measures_noise: bool = False


def make_train_step(parts: TrainStep):
    """Returns a function of (iterator over micro-batches, learning rate, momentum, timed, position, signals).

    It is one update. It returns one float32 vector (see StepResult), which a single copy brings to the host. timed:
    whether to measure waiting times and to compare the workers' weights, bool, on the host. position: that of the
    global batch's first sample in the stream, int64, on which the masks of dropout depend. Results and batch norm's
    statistics are summed over the workers in one message. Gradients and these are divided by the number of
    micro-batches after they are summed.
    """
    optimizer, moving = parts.optimizer, parts.moving
    variables, rates = parts.model.trainable_variables, distributed.inner(optimizer)
    shapes = [*(variable.shape for variable in variables), (3,), (moving.size if moving else 0,),
              (len(variables) if parts.measures_noise else 0,)]
    gradients_of = accumulated(make_micro_batch(parts), shapes, parts.accumulation_steps, parts.in_tree)
    micro_batches = parts.micro_batches or parts.accumulation_steps * distributed.workers()

    @tf.function(autograph=False)
    def step(iterator, learning_rate, momentum, timed=False, position=0, signals=NO_SIGNALS):
        clock = Clock(tf.convert_to_tensor(timed))
        ready = clock.after([learning_rate])
        rates.learning_rate.assign(learning_rate)
        if isinstance(getattr(rates, "momentum", None), tf.Variable):
            rates.momentum.assign(momentum)
        (*gradients, results, statistics, squares), waited, ready = gradients_of(iterator, position, ready, clock)
        gradients, gradient_norms = distributed.average(optimizer, gradients, micro_batches)
        exchanged = tf.maximum(clock.after([one.tensor for one in gradients]) - ready, 0.0)
        if parts.layers:
            parts.layers.record(gradient_norms)
        updates = rates.iterations.read_value()
        distributed.apply(optimizer, gradients, gradient_norms, variables)
        signals, results, statistics, squares, digits = distributed.sum_over_workers(
            optimizer, [tf.convert_to_tensor(signals), results, statistics, squares,
                        weight_check.digits(variables, tf.convert_to_tensor(timed))], "results")
        parts.totals.add(results)
        if moving:
            moving.move(statistics / micro_batches, updates)
        if parts.after_update:
            parts.after_update()
        waited = tf.cast(tf.stack([waited, exchanged]), tf.float32)
        return tf.concat([signals, results[:2] / results[2], digits, gradient_norms, squares / micro_batches, waited],
                         axis=0)

    return step


def make_micro_batch(parts: TrainStep):
    """Returns a function of (number of the micro-batch, iterator, position, ready, clock).

    It returns ([*gradients, results, statistics, squares], seconds waited for data, time of its end). results: sums of
    loss and top-1 hits, and the number of samples, float32 (3,). statistics: batch norm's, as flat_statistics returns
    them, or empty if none move. squares: as in StepResult. number: from this worker's first. position: of the global
    batch. ready: time at which the previous micro-batch ended.
    """
    model, optimizer, variables = parts.model, parts.optimizer, parts.model.trainable_variables
    own = parts.own or range(parts.accumulation_steps)

    @tf.function(jit_compile=parts.xla, reduce_retracing=True, autograph=False)
    def backward(images, labels, position, rows=None):
        with tf.GradientTape() as tape, parts.span.applied_to(model) as observed, masks_at(model, position):
            logits = model(images if rows is None else mixing.mixed(images, rows), training=True)
            losses = cross_entropy(logits, labels, parts.label_smoothing)
            if rows is not None:
                weight = mixing.label_weight(rows)
                losses = weight * losses + (1 - weight) * cross_entropy(
                    logits, mixing.partners(labels), parts.label_smoothing)
            loss = distributed.scale(optimizer, tf.reduce_mean(losses))
        return tape.gradient(loss, variables), flat_statistics(observed if parts.moving else {}), losses, logits

    def micro_batch(number, iterator, position, ready, clock):
        with tf.control_dependencies([ready]):
            images, labels, *rows = next(iterator)
        arrived = clock.after([images, labels])
        with tf.control_dependencies([arrived]):  # with one thread, the clock could be read after computing
            images = tf.identity(images)
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
            squares = tf.square(norms_of(gradients) / distributed.scale(optimizer, tf.constant(1.0)))
        return [*gradients, results, statistics, squares], tf.maximum(arrived - ready, 0.0), clock.after(gradients)

    return micro_batch


def accumulated(micro_batch, shapes: Sequence, accumulation_steps: int, in_tree: bool = False):
    """Returns a function that runs `micro_batch` accumulation_steps times and sums its tensors and the seconds waited.

    shapes: of these tensors, all float32. in_tree: whether to add them in the order of distributed.tree, with a partial
    sum for each of its levels instead of one.

    It replaces Horovod's backward_passes_per_step, so that the number of steps can change and an update is one
    iteration of the optimizer. All micro-batches except the last run in a loop. The last runs after the loop, so that
    its gradients are exchanged while the rest of its backward pass runs.
    """
    levels = tree.branches(accumulation_steps) if in_tree else (accumulation_steps,)
    paths = [tree.path(leaf, levels) if in_tree else ((0,), 0) for leaf in range(accumulation_steps - 1)]
    kinds = sorted(set(paths))
    kind_of = tf.constant([kinds.index(path) for path in paths])

    def kept(terms, partial, added, level):
        """Returns the partial sums with these terms: those of the levels `added`, plus the terms, are kept at `level`.
        """
        return [*partial[:level], added_to(terms, partial, added), *partial[level + 1:]]

    def summed(iterator, position, ready, clock):
        def one_more(number, ready, waited, partial):
            terms, wait, ready = micro_batch(number, iterator, position, ready, clock)
            ways = [functools.partial(kept, terms, partial, *kind) for kind in kinds]
            partial = tf.switch_case(kind_of[number], ways) if len(ways) > 1 else ways[0]()
            return number + 1, ready, waited + wait, partial

        number, ready, waited, partial = tf.while_loop(
            lambda number, *_: number < accumulation_steps - 1, one_more,
            (tf.constant(0), ready, tf.constant(0.0, tf.float64), [[tf.zeros(one) for one in shapes] for _ in levels]))
        terms, wait, ready = micro_batch(number, iterator, position, ready, clock)
        return added_to(terms, partial, range(len(levels))), waited + wait, ready

    return functools.partial(micro_batch, 0) if accumulation_steps == 1 else summed


def added_to(terms: list, partial: list[list], levels: Iterable[int]) -> list:
    """Adds terms to the partial sums of these levels, one level after another."""
    for level in levels:
        terms = [a + b for a, b in zip(partial[level], terms, strict=True)]
    return terms


def make_evaluation_step(model):
    """Returns a function of an iterator over batches.

    It returns label, predicted class, loss and rivals_of each sample of the next batch, float32 (batch, 4).
    """

    @tf.function(autograph=False)
    def step(iterator):
        images, labels = next(iterator)
        labels = tf.squeeze(labels, 1)
        logits = tf.cast(model(images, training=False), tf.float32)
        predicted = tf.argmax(logits, axis=1, output_type=tf.int32)
        columns = labels, predicted, cross_entropy(logits, labels, 0.0), rivals_of(logits, labels)
        return tf.stack([tf.cast(column, tf.float32) for column in columns], axis=1)

    return step
