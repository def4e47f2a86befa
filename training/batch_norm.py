"""Batch norm: the samples that its statistics cover, moving statistics, and exact statistics for an evaluation.

The last follow "Batch Normalization without Moving Average" (arXiv:1711.04325, section 3), which claims that moving
averages become inaccurate with very large batches. arXiv:1811.05233 uses it, too (section 3.2), and averages mean and
mean of squares in float32, because float16 lacks the range. Here they are float32 for any precision of the model.
"""
import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from common.activity import OTHERS, activity
from data.feed import OpenPipeline
from distributed.fixed_point import FixedPoint
from distributed.neighbours import Neighbours
from distributed.world import World
from model_zoo.layers import masks_at, norms
from plan.plan import Phase
from training.bad_input import bad_input_is_user_error
from training.clock import batch_counts

LEAST_SAMPLES = 2048  # training samples to measure, over all workers, or the whole set if it is smaller

READ_AHEAD = 16  # measurements for which one pipeline reads


@dataclass(frozen=True)
class Span:
    """The samples over which batch norm computes its statistics: a part of a micro-batch, or several workers' ones."""

    groups: int = 1  # parts of a micro-batch, each with statistics of its own
    neighbours: Neighbours | None = None  # the workers that share statistics, if each has a single group

    @classmethod
    def of(cls, phase: Phase, workers: int) -> "Span":
        neighbours = Neighbours(phase.neighbours, workers) if phase.neighbours > 1 else None
        return cls(max(1, phase.micro_batch_size // phase.batch_norm_span), neighbours)

    @contextlib.contextmanager
    def applied_to(self, model) -> Iterator[dict[int, tuple[tf.Tensor, tf.Tensor]]]:
        """Context manager in which a call of the model, in training, is traced with this span.

        Yields a dict, which the call fills: index of a layer in `norms` -> (its statistics, its input).
        """
        layers, observed = norms(model), {}
        for number, layer in enumerate(layers):
            layer.groups = self.groups
            layer.neighbours = self.neighbours.count if self.neighbours else 1
            if self.neighbours:
                layer.mean_over_neighbours = functools.partial(self.neighbours.mean, name=f"batch_norm_{number}")
            layer.observe = functools.partial(_keep, observed, number)
        try:
            yield observed
        finally:
            for layer in layers:
                layer.groups = layer.neighbours = 1
                layer.mean_over_neighbours = layer.observe = None


def _keep(observed, number, *values):
    observed[number] = values


MICRO_BATCH = Span()  # the whole micro-batch


class MovingStatistics:
    """The moving means and variances of all batch-norm layers, moved once per update of the weights.

        average <- average + (1 - momentum) / (1 - momentum ** updates) * (statistics - average)

    `statistics` are the means over all groups of the global batch, so neither the number of workers nor accumulation
    has an influence. The division makes this the mean with weights momentum ** age over the updates made, as in Adam
    (arXiv:1412.6980, section 3): the initial 0 and 1 have no weight.

    They are kept as one vector, float32 (2 x all channels,), so that moving them takes only a few operations per step.
    Call `write`, which copies it to the layers, before anything reads the layers.

    keeps_initial: whether the layers' initial statistics are those of trained weights, which count like any others.
    """

    def __init__(self, model, keeps_initial: bool = False):
        layers = norms(model)
        self._variables = [variable for layer in layers for variable in (layer.moving_mean, layer.moving_variance)]
        self._momentum = layers[0].momentum if layers else 0.0
        self.keeps_initial = keeps_initial
        self._vector = tf.Variable(self._flat(), trainable=False)

    @property
    def size(self) -> int:
        return self._vector.shape[0]

    def move(self, statistics: tf.Tensor, updates: tf.Tensor, is_updated: bool | tf.Tensor = True) -> None:
        """Moves the averages. statistics: as flat_statistics returns them. updates: number of updates made before.

        is_updated: whether the weights were updated. If the loss scale has skipped that, the averages stay.
        """
        rate = 1 - self._momentum
        if not self.keeps_initial:  # momentum 1 never moves them
            rate = tf.math.divide_no_nan(rate, 1 - tf.pow(self._momentum, tf.cast(updates, tf.float32) + 1))
        if is_updated is not True:
            statistics = tf.where(is_updated, statistics, self._vector)
        self._vector.assign_add(rate * (statistics - self._vector))

    def write(self) -> None:
        """Assigns the averages to the layers."""
        sizes = [variable.shape.num_elements() for variable in self._variables]
        for variable, values in zip(self._variables, tf.split(self._vector, sizes) if sizes else [], strict=True):
            variable.assign(values)

    def read(self) -> None:
        """Copies the averages from the layers, after a checkpoint has set them."""
        self._vector.assign(self._flat())

    def _flat(self):
        return tf.concat([tf.zeros(0), *map(tf.convert_to_tensor, self._variables)], axis=0)


def flat_statistics(observed: dict[int, tuple[tf.Tensor, tf.Tensor]]) -> tf.Tensor:
    """Returns the statistics that Span.applied_to has observed as one vector, in the order of MovingStatistics."""
    return tf.concat([tf.zeros(0), *(tf.reshape(statistics, [-1]) for _, (statistics, _) in sorted(observed.items()))],
                     axis=0)


class ExactStatistics:
    """Sets a model's moving mean and variance to the statistics of training batches under the current weights.

    Their sums are exact, so they have the same bits on any number of workers.
    """

    def __init__(self, model, world: World):
        self._world = world
        self._model = model
        self._layers = norms(model)
        self._traced = {}
        self._pipeline = OpenPipeline()
        self._read = 0  # samples that measurements have read from it

    def measure(self, feed, positions: Sequence[int], phase: Phase) -> None:
        """Measures training batches of a phase's sizes that start at the first of these positions in the stream.

        The other positions are those of the next calls: if the format supports any order, one pipeline reads all of
        them. Earlier reads have no influence on the result. Raises UserError for data that cannot be read.
        """
        if not self._layers:
            return
        steps = -(-min(LEAST_SAMPLES, feed.dataset.train.samples) // phase.global_batch_size)
        span = Span.of(phase, self._world.size)
        if span not in self._traced:
            self._traced[span] = self._trace(span)
        batches = self._batches(feed, positions, steps, phase)

        def moments():
            with bad_input_is_user_error("measuring batch-norm statistics stopped", batches, self._read):
                batches.admit(1)
                measured = self._traced[span](batches.iterator)
            self._read += phase.micro_batch_size
            return measured

        micro_batches = steps * phase.micro_batches
        form = FixedPoint.lossless(micro_batches)
        sizes = [2 * layer.moving_mean.shape[0] for layer in self._layers]
        summed = form.zero([sum(sizes)])
        for _ in range(steps * len(phase.micro_batches_of(feed.shard, feed.shards))):
            summed += form.term(moments())
        with activity.during(OTHERS):
            summed = self._world.sum(summed, "batch_norm_statistics")
        means = form.total(summed, [sum(sizes)]) / micro_batches
        for layer, values in zip(self._layers, tf.split(means, sizes), strict=True):
            mean, squares = tf.split(values, 2)
            layer.moving_mean.assign(mean)
            layer.moving_variance.assign(tf.maximum(squares - tf.square(mean), 0))

    def _batches(self, feed, positions: Sequence[int], steps: int, phase: Phase):
        """Returns batches, of which `steps` global batches from the first position come next."""
        positions = positions[:READ_AHEAD] if feed.dataset.train.any_order else positions[:1]
        wanted = [(feed, steps, phase, position) for position in positions]

        def opening():
            self._read = 0
            return feed.open(feed.prepare([(position, steps) for position in positions], phase.global_batch_size,
                                          phase.micro_batch_size, neighbours=phase.neighbours))

        return self._pipeline.open_for(wanted, opening)

    def _trace(self, span):
        """Returns a compiled function that reads a micro-batch and measures the input of each layer.

        It returns the mean and the mean of squares of each input, one after another, float32 (2 x all channels,).
        """
        counts = batch_counts()

        @tf.function(autograph=False)
        def moments(batches):
            images, *_ = counts.next_of(batches)  # not mixed, as in an evaluation
            with span.applied_to(self._model) as observed, masks_at(self._model, tf.constant(0, tf.int64)):
                self._model(images, training=True)
            inputs = [tf.cast(x, tf.float32) for _, (_, x) in sorted(observed.items())]
            means = tf.concat([tf.reduce_mean(f, axis=list(range(len(x.shape) - 1)))
                               for x in inputs for f in (x, tf.square(x))], axis=0)
            counts.set_computed([means])
            return means

        return moments
