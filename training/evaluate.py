"""Exact evaluation: each validation sample counts once, for any number of workers and any remainder."""
import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

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

CHECK_EVERY = 16  # batches between two checks for a request to stop
COLUMNS = 5  # of EvaluationResult.outcomes
VIEWS_COLUMNS = 2  # with views: loss and label_ranks of the mean logits


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation, the same on all workers."""

    # val_loss, val_top1, val_top5 (means over all samples), val_top1_count, val_top5_count, val_samples, and
    # val_guess_count: the number of samples of the most frequent class. With several views, views_val_loss and so on.
    metrics: dict[str, float]
    # Label, predicted class, loss, training.losses.label_ranks and probability of the predicted class of each sample in
    # the order of the dataset, float32 (samples, 5), by the moving average of the weights if there is one.
    outcomes: np.ndarray
    # The most probable classes of each sample and their probabilities, best first, float32 (samples, 2 * guesses).
    guesses: np.ndarray


class Evaluator:
    """Evaluates a model on this worker's shard of the validation set and gathers the outcomes of all workers.

    average: optim.average.WeightAverage, which is evaluated, too, or None. guesses: number of classes in
    EvaluationResult.guesses. views: of each image (model_zoo.views). With several, their mean logits are evaluated,
    too; outcomes and guesses stay those of the image itself.
    """

    def __init__(self, model, feed, batch_size: int, world: World, average=None, guesses: int = 0, views: int = 1):
        self._step = make_evaluation_step(model, guesses, views)
        self._columns = COLUMNS + 2 * guesses + VIEWS_COLUMNS * (views > 1)
        self._guesses = slice(COLUMNS, COLUMNS + 2 * guesses)
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
            swapped["ema_"] = self._average.swapped_in()
        for prefix, weights in swapped.items():
            with activity.during("evaluating", batch_counts().in_evaluation), weights:
                measure()
                outcomes = self._evaluate(stop)
            if outcomes is None:
                return None
            metrics |= {f"{prefix}{name}": value for name, value in self._metrics(outcomes).items()}
        return EvaluationResult(metrics, outcomes[:, :COLUMNS], outcomes[:, self._guesses])

    def _metrics(self, outcomes: np.ndarray) -> dict[str, float]:
        """Returns means and counts over all samples, added in the order of the dataset."""
        labels, _, losses, ranks, *_ = outcomes.T
        found = self._means(losses, ranks) | {
            metric.VAL_SAMPLES: len(outcomes),
            metric.VAL_GUESS_COUNT: int(np.unique(labels, return_counts=True)[1].max())}
        of_views = outcomes[:, self._guesses.stop:].T
        return found | {f"{metric.VIEWS}{name}": value
                        for name, value in (self._means(*of_views).items() if of_views.size else ())}

    def _means(self, losses: np.ndarray, ranks: np.ndarray) -> dict[str, float]:
        samples = len(losses)
        top1, top5 = (int(np.sum(ranks < most)) for most in (1, min(5, len(self._feed.dataset.classes))))
        return {metric.VAL_LOSS: float(np.mean(losses, dtype=np.float64)), metric.VAL_TOP1: top1 / samples,
                metric.VAL_TOP5: top5 / samples, metric.VAL_TOP1_COUNT: top1, metric.VAL_TOP5_COUNT: top5}

    def _evaluate(self, stop) -> np.ndarray | None:
        """Returns the outcomes of all workers, or None if `stop` is true."""
        outcomes = [tf.zeros([0, self._columns])]
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
                outcomes.append(self._step(batches.iterator)[:samples - start])
        if not self._feed.dataset.validation.any_order:  # batches of other samples would follow
            self._pipeline.close()
        return self._world.concatenate(tf.concat(outcomes, axis=0).numpy(), "outcomes")


def make_evaluation_step(model, guesses: int = 0, views: int = 1):
    """Returns a function of an iterator over batches.

    It returns the outcome of each sample of the next batch (see EvaluationResult), its most probable classes and their
    probabilities, and with several views the VIEWS_COLUMNS, float32 (batch, columns).
    """
    counts = batch_counts()
    logits_of = functools.partial(model, training=False)

    @tf.function(autograph=False)
    def step(iterator):
        images, labels = counts.next_of(iterator)
        labels = tf.squeeze(labels, 1)
        logits = tf.cast(logits_of(images), tf.float32)
        predicted = tf.argmax(logits, axis=1, output_type=tf.int32)
        probabilities = tf.nn.softmax(logits)
        columns = (labels, predicted, cross_entropy(logits, labels), label_ranks(logits, labels),
                   tf.reduce_max(probabilities, axis=1))
        outcomes = tf.stack([tf.cast(column, tf.float32) for column in columns], axis=1)
        if guesses:
            probabilities, classes = tf.math.top_k(probabilities, guesses)
            outcomes = tf.concat([outcomes, tf.cast(classes, tf.float32), probabilities], axis=1)
        if views > 1:
            mean = mean_logits(logits_of, images, views)
            outcomes = tf.concat(
                [outcomes, tf.stack([cross_entropy(mean, labels), label_ranks(mean, labels)], axis=1)], axis=1)
        counts.set_computed([outcomes])
        return outcomes

    return step
