"""One update: gradients summed over the micro-batches, one exchange, one optimizer step."""
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from data import mixing
from distributed import optimizer as distributed
from distributed.world import World
from optim.stacks import norms_of
from training.batch_norm import MICRO_BATCH, MovingStatistics, Span, flat_statistics
from training.breakdown import NAMES, Clock

NO_SIGNALS = (0.0, 0.0)


@dataclass(frozen=True)
class StepResult:
    """The results of a step. All except `waited` are the same on all workers.

    signals: their mean over the workers. loss, top1: means over the global batch. norms: of the averaged gradients.
    squares: mean over the micro-batches of the squared norm of each variable's gradient, or empty. waited: seconds that
    this worker has waited for each of breakdown.NAMES, or zeros if the step was not timed.
    """

    signals: np.ndarray
    loss: float
    top1: float
    norms: np.ndarray
    squares: np.ndarray
    waited: np.ndarray

    @classmethod
    def unpack(cls, packed: np.ndarray, has_squares: bool = False) -> "StepResult":
        """Unpacks the result of a step. packed: on the host. has_squares: whether TrainStep.measures_noise."""
        signals, results, norms, waited = np.split(packed, [len(NO_SIGNALS), len(NO_SIGNALS) + 2, -len(NAMES)])
        norms, squares = np.split(norms, [len(norms) // 2 if has_squares else len(norms)])
        return cls(signals, *map(float, results), norms, squares, waited)


class Totals:
    """Sums over samples since the last reset: loss, top-1 and top-5 hits, samples. float64 keeps the counts exact."""

    NAMES = ("loss", "top1", "top5", "samples")

    def __init__(self):
        self.variable = tf.Variable(tf.zeros(len(self.NAMES), tf.float64), trainable=False)

    def add(self, losses, logits, labels, counted) -> tf.Tensor:
        """Adds a batch and returns its top-1 hits, bool (batch,).

        losses: float (batch,). logits: (batch, classes). labels: int (batch,). counted: bool (batch,).
        """
        rivals = rivals_of(logits, labels)
        top1, top5 = rivals < 1, rivals < min(5, logits.shape[-1])
        columns = [losses, top1, top5, tf.ones_like(losses)]
        columns = tf.stack([tf.cast(column, tf.float64) for column in columns])
        self.variable.assign_add(tf.reduce_sum(tf.where(counted, columns, tf.zeros_like(columns)), axis=1))
        return top1

    def reset(self) -> None:
        self.variable.assign(tf.zeros_like(self.variable))

    def collect(self, world: World) -> dict[str, float]:
        """Sums over all workers and resets. Returns loss, top1, top5 (means), top1_count, top5_count and samples."""
        sums = world.sum(self.variable.read_value(), "totals").numpy()
        self.reset()
        totals = dict(zip(self.NAMES, sums.tolist(), strict=True))
        samples = int(totals["samples"])
        return {name: totals[name] / samples for name in ("loss", "top1", "top5")} | {
            "top1_count": int(totals["top1"]), "top5_count": int(totals["top5"]), "samples": samples}


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

    totals: sums the training's loss and hits. accumulation_steps: number of micro-batches of this worker. mean_steps:
    their mean over the workers, if it differs. xla: whether XLA compiles the forward and backward pass. moving: batch
    norm's moving statistics, to move with each update. layers: records norms and trust ratios. span: of batch norm's
    statistics, applied when the step is traced. after_update: called in the graph after the update. measures_noise:
    whether it measures what training.noise_scale needs.
    """

    model: tf.keras.Model
    optimizer: tf.keras.optimizers.Optimizer
    totals: Totals
    accumulation_steps: int = 1
    label_smoothing: float = 0.0
    xla: bool = False
    moving: MovingStatistics | None = None
    layers: LayerStatistics | None = None
    span: Span = MICRO_BATCH
    after_update: Callable[[], None] | None = None
    mean_steps: float | None = None
    measures_noise: bool = False


def make_train_step(parts: TrainStep):
    """Returns a function of (iterator over micro-batches, learning rate, momentum, timed, signals): one update.

    The function returns one float32 vector (see StepResult), which a single copy brings to the host. timed: whether to
    measure waiting times, bool, on the host. Results and batch norm's statistics are averaged over the workers in one
    message.
    """
    optimizer, moving = parts.optimizer, parts.moving
    variables, rates = parts.model.trainable_variables, distributed.inner(optimizer)
    shapes = [*(variable.shape for variable in variables), (2,), (moving.size if moving else 0,),
              (len(variables) if parts.measures_noise else 0,)]
    gradients_of = accumulated(make_micro_batch(parts), shapes, parts.accumulation_steps)

    @tf.function(autograph=False)
    def step(iterator, learning_rate, momentum, timed=False, signals=NO_SIGNALS):
        clock = Clock(tf.convert_to_tensor(timed))
        ready = clock.after([learning_rate])
        rates.learning_rate.assign(learning_rate)
        if hasattr(rates, "momentum"):
            rates.momentum.assign(momentum)
        (*gradients, results, statistics, squares), waited, ready = gradients_of(iterator, ready, clock)
        gradients, gradient_norms = distributed.average(optimizer, gradients)
        exchanged = tf.maximum(clock.after([one.tensor for one in gradients]) - ready, 0.0)
        if parts.layers:
            parts.layers.record(gradient_norms)
        updates = rates.iterations.read_value()
        distributed.apply(optimizer, gradients, gradient_norms, variables)
        signals, results, statistics, squares = distributed.mean(
            optimizer, [tf.convert_to_tensor(signals), results, statistics, squares], "results")
        if moving:
            moving.move(statistics, updates)
        if parts.after_update:
            parts.after_update()
        waited = tf.cast(tf.stack([waited, exchanged]), tf.float32)
        return tf.concat([signals, results, gradient_norms, squares, waited], axis=0)

    return step


def make_micro_batch(parts: TrainStep):
    """Returns a function of (iterator, ready, clock).

    It returns ([*gradients, results, statistics, squares], seconds waited for data, time of its end). results: mean
    loss and top-1, float32 (2,). statistics: batch norm's, as flat_statistics returns them, or empty if none move.
    squares: as in StepResult. ready: time at which the previous micro-batch ended. All are divided by the number of
    steps.
    """
    model, optimizer = parts.model, parts.optimizer
    variables, mean_steps = model.trainable_variables, parts.mean_steps or parts.accumulation_steps

    @tf.function(jit_compile=parts.xla, reduce_retracing=True, autograph=False)
    def backward(images, labels, rows=None):
        with tf.GradientTape() as tape, parts.span.applied_to(model) as observed:
            logits = model(images if rows is None else mixing.mixed(images, rows), training=True)
            losses = cross_entropy(logits, labels, parts.label_smoothing)
            if rows is not None:
                weight = mixing.label_weight(rows)
                losses = weight * losses + (1 - weight) * cross_entropy(
                    logits, mixing.partners(labels), parts.label_smoothing)
            loss = distributed.scale(optimizer, tf.reduce_mean(losses) / mean_steps)
        statistics = flat_statistics(observed if parts.moving else {}) / mean_steps
        return tape.gradient(loss, variables), statistics, losses, logits

    def micro_batch(iterator, ready, clock):
        with tf.control_dependencies([ready]):
            images, labels, *rows = next(iterator)
        arrived = clock.after([images, labels])
        with tf.control_dependencies([arrived]):  # with one thread, the clock could be read after computing
            images = tf.identity(images)
        labels = tf.squeeze(labels, 1)
        gradients, statistics, losses, logits = backward(images, labels, *rows)
        if rows:  # top-1 counts the label with the larger weight
            labels = tf.where(mixing.label_weight(*rows) < 0.5, mixing.partners(labels), labels)
        top1 = parts.totals.add(losses, tf.cast(logits, tf.float32), labels, tf.ones_like(losses, tf.bool))
        results = tf.stack([tf.reduce_mean(losses), tf.reduce_mean(tf.cast(top1, tf.float32))]) / mean_steps
        squares = tf.zeros([0])
        if parts.measures_noise:
            unit = mean_steps / distributed.scale(optimizer, tf.constant(1.0))  # the gradients' own
            squares = tf.square(norms_of(gradients) * unit) / mean_steps
        return [*gradients, results, statistics, squares], tf.maximum(arrived - ready, 0.0), clock.after(gradients)

    return micro_batch


def accumulated(micro_batch, shapes: Sequence, accumulation_steps: int):
    """Returns a function that runs `micro_batch` accumulation_steps times and sums its tensors and the seconds waited.

    shapes: of these tensors, all float32.

    It replaces Horovod's backward_passes_per_step, so that the number of steps can change and an update is one
    iteration of the optimizer. All micro-batches except the last run in a loop. The last runs after the loop, so that
    its gradients are exchanged while the rest of its backward pass runs.
    """
    def summed(iterator, ready, clock):
        def one_more(number, ready, waited, sums):
            one, wait, ready = micro_batch(iterator, ready, clock)
            return number + 1, ready, waited + wait, [a + b for a, b in zip(sums, one, strict=True)]

        before_last = tf.while_loop(
            lambda number, *_: number < accumulation_steps - 1, one_more,
            (tf.constant(0), ready, tf.constant(0.0, tf.float64), [tf.zeros(shape) for shape in shapes]))
        _, ready, waited, sums = one_more(*before_last)
        return sums, waited, ready

    return micro_batch if accumulation_steps == 1 else summed


def make_evaluation_step(model, totals: Totals):
    """Returns a function of (iterator over batches, valid) that counts the first `valid` samples of the next batch.

    It returns label, predicted class and loss of each sample of the batch, float32 (batch, 3).
    """

    @tf.function(autograph=False)
    def step(iterator, valid):
        images, labels = next(iterator)
        labels = tf.squeeze(labels, 1)
        logits = tf.cast(model(images, training=False), tf.float32)
        losses = cross_entropy(logits, labels, 0.0)
        totals.add(losses, logits, labels, tf.range(tf.shape(labels)[0]) < valid)
        predicted = tf.argmax(logits, axis=1, output_type=tf.int32)
        return tf.stack([tf.cast(labels, tf.float32), tf.cast(predicted, tf.float32), losses], axis=1)

    return step
