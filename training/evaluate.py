"""Exact evaluation: each validation sample counts once, for any number of workers and any remainder."""
import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from common import metric
from common.activity import activity
from data.feed import OpenPipeline
from distributed.world import World
from model_zoo.views import mean_logits
from training.bad_input import bad_input_is_user_error
from training.clock import batch_counts
from training.losses import cross_entropy, label_ranks
from training.outcomes import Outcomes

CHECK_EVERY = 16  # batches between two checks for a request to stop


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation, the same on all workers."""

    # val_loss, val_top1, val_top5 (means over all samples), val_top1_count, val_top5_count, val_samples, and
    # val_guess_count: the number of samples of the most frequent class. With several views, views_val_loss and so on.
    metrics: dict[str, float]
    outcomes: Outcomes
    # The most probable classes of each sample, best first, and their probabilities, float32 (samples, guesses) each.
    guesses: tuple[np.ndarray, np.ndarray]


class Found(NamedTuple):
    """What the samples of a batch, or of the validation set, give. It is exchanged as one matrix."""

    outcomes: Outcomes
    guesses: tuple[Any, Any]  # as in EvaluationResult
    views: Any  # with several views, the loss and label_ranks of the mean logits, (2, samples); otherwise empty

    def packed(self) -> tf.Tensor:
        """Returns the tensors as one matrix, float32 (samples, columns)."""
        parts = [tf.stack(self.outcomes, axis=1), *self.guesses, tf.transpose(self.views)]
        return tf.concat(parts, axis=1)

    @classmethod
    def unpacked(cls, matrix: np.ndarray, guesses: int) -> "Found":
        """Returns what `packed` has packed. guesses: number of classes for each sample."""
        own, classes, probabilities, views = np.split(matrix, np.cumsum([len(Outcomes._fields), guesses, guesses]), 1)
        return cls(Outcomes(*own.T), (classes, probabilities), views.T)


class Evaluator:
    """Evaluates a model on this worker's shard of the validation set and gathers the outcomes of all workers.

    average: optim.average.WeightAverage, which is evaluated, too, or None. guesses: number of classes in
    EvaluationResult.guesses. views: of each image (model_zoo.views). With several, their mean logits are evaluated,
    too; outcomes and guesses stay those of the image itself.
    """

    def __init__(self, model, feed, batch_size: int, world: World, average=None, guesses: int = 0, views: int = 1):
        self._step = make_evaluation_step(model, guesses, views)
        self._guesses = guesses
        self._columns = len(Outcomes._fields) + 2 * guesses + 2 * (views > 1)
        self._feed = feed
        self._batch_size = batch_size
        self._world = world
        self._average = average
        self._pipeline = OpenPipeline()

    def __call__(self, stop: Callable[[], bool] = lambda: False, measure: Callable[[], None] = lambda: None
                 ) -> EvaluationResult | None:
        """Evaluates the model. The metrics of the moving average, if there is one, are ema_val_loss and so on.

        With several views, views_val_loss and so on are those of their mean logits, by the average ema_views_val_loss.

        measure: called before each evaluation, to measure batch norm's statistics under the weights to evaluate.
        stop: called every CHECK_EVERY batches, on all workers at once. If it returns true, the result is None.
        """
        metrics, swapped = {}, {"": contextlib.nullcontext()}
        if self._average:
            swapped[metric.EMA] = self._average.swapped_in()
        for prefix, weights in swapped.items():
            with activity.during("evaluating", batch_counts().in_evaluation), weights:
                measure()
                found = self._evaluate(stop)
            if found is None:
                return None
            metrics |= {f"{prefix}{name}": value for name, value in self._metrics(found).items()}
        return EvaluationResult(metrics, found.outcomes, found.guesses)

    def _metrics(self, found: Found) -> dict[str, float]:
        """Returns means and counts over all samples, added in the order of the dataset."""
        labels, _, losses, ranks, _ = found.outcomes
        means = self._means(losses, ranks) | {
            metric.VAL_SAMPLES: len(labels),
            metric.VAL_GUESS_COUNT: int(np.unique(labels, return_counts=True)[1].max())}
        of_views = self._means(*found.views) if found.views.size else {}
        return means | {f"{metric.VIEWS}{name}": value for name, value in of_views.items()}

    def _means(self, losses: np.ndarray, ranks: np.ndarray) -> dict[str, float]:
        samples = len(losses)
        top1, top5 = (int(np.sum(ranks < most)) for most in (1, min(5, len(self._feed.dataset.classes))))
        return {metric.VAL_LOSS: float(np.mean(losses, dtype=np.float64)), metric.VAL_TOP1: top1 / samples,
                metric.VAL_TOP5: top5 / samples, metric.VAL_TOP1_COUNT: top1, metric.VAL_TOP5_COUNT: top5}

    def _evaluate(self, stop) -> Found | None:
        """Returns what all workers have found, or None if `stop` is true."""
        packed = [tf.zeros([0, self._columns])]
        batches_of_all = -(-self._feed.dataset.validation.samples // self._batch_size)
        opening = functools.partial(self._feed.validation, self._batch_size)
        batches, samples = self._pipeline.open_for(itertools.repeat("validation"), opening)
        for number in range(-(-batches_of_all // self._feed.shards)):
            start = number * self._batch_size
            if number % CHECK_EVERY == 0 and stop():
                self._pipeline.close()
                return None
            if start >= samples:
                continue
            with bad_input_is_user_error(f"evaluation stopped after {start} of {samples} samples", batches, start):
                batches.admit(1)
                packed.append(self._step(batches.iterator)[:samples - start])
        if not self._feed.dataset.validation.any_order:  # batches of other samples would follow
            self._pipeline.close()
        matrix = self._world.concatenate(tf.concat(packed, axis=0).numpy(), "outcomes")
        return Found.unpacked(matrix, self._guesses)


def make_evaluation_step(model, guesses: int = 0, views: int = 1):
    """Returns a function of an iterator over batches, which returns Found.packed of the next batch."""
    counts = batch_counts()
    logits_of = functools.partial(model, training=False)

    @tf.function(autograph=False)
    def step(iterator):
        images, labels = counts.next_of(iterator)
        labels = tf.squeeze(labels, 1)
        logits = tf.cast(logits_of(images), tf.float32)
        probabilities = tf.nn.softmax(logits)
        outcomes = Outcomes(
            labels=tf.cast(labels, tf.float32), predicted=tf.cast(tf.argmax(logits, axis=1), tf.float32),
            losses=cross_entropy(logits, labels), ranks=label_ranks(logits, labels),
            probabilities=tf.reduce_max(probabilities, axis=1))
        highest, classes = tf.math.top_k(probabilities, guesses)
        of_views = tf.zeros([0, tf.shape(labels)[0]])
        if views > 1:
            mean = mean_logits(logits_of, images, views, logits)
            of_views = tf.stack([cross_entropy(mean, labels), label_ranks(mean, labels)])
        packed = Found(outcomes, (tf.cast(classes, tf.float32), highest), of_views).packed()
        counts.set_computed([packed])
        return packed

    return step
