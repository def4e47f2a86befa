"""The evaluation of a model whose answers are known, beside what answers otherwise: averaged weights, views."""
import math

import numpy as np
import pytest

from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from distributed.world import World
from optim.average import WeightAverage
from training.evaluate import Evaluator


def test_the_outcomes_are_those_of_the_weights_that_are_judged(digits):
    """The weights always answer 1, and the average always 3."""
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.layers.Flatten(input_shape=(8, 8, 3)),
                                 tf.keras.layers.Dense(10, kernel_initializer="zeros")])
    average = WeightAverage(model, 0.9, 32)
    model.variables[1].assign(np.eye(10)[1])
    average.variables[1].assign(np.eye(10)[3])
    feed = Feed(open_dataset(digits), 8, AUGMENTATIONS["none"], 0)
    found, alone = (Evaluator(model, feed, 32, World(), one)() for one in (average, None))
    assert (found.outcomes.predicted == 3).all() and (alone.outcomes.predicted == 1).all()
    assert found.outcomes.probabilities == pytest.approx(math.e / (math.e + 9), rel=1e-6)  # softmax of one 1 and nine 0
    ones, threes = (np.sum(found.outcomes.labels == label) for label in (1, 3))
    assert (found.metrics["val_top1_count"], found.metrics["ema_val_top1_count"]) == (ones, threes)


def test_views_stand_beside_the_image_itself(digits):
    """The model answers 1 if the left half is brighter than the right one, and 2 otherwise: the mirror image votes
    against the image, with the same weight. A class that neither names has the same logit as both, and ties are misses.
    """
    import tensorflow as tf

    pixels = tf.keras.Input((8, 8, 3))
    brighter = tf.reduce_mean(pixels[:, :, :4] - pixels[:, :, 4:], axis=[1, 2, 3])[:, None]
    model = tf.keras.Model(pixels, tf.cast(brighter > 0, tf.float32) * np.eye(10, dtype=np.float32)[1]
                           + tf.cast(brighter < 0, tf.float32) * np.eye(10, dtype=np.float32)[2])
    feed = Feed(open_dataset(digits), 8, AUGMENTATIONS["none"], 0)
    plain, viewed = (Evaluator(model, feed, 32, World(), guesses=2, views=views)() for views in (1, 2))
    assert {name: value for name, value in viewed.metrics.items() if not name.startswith("views_")} == plain.metrics
    for ours, theirs in zip([*viewed.outcomes, *viewed.guesses], [*plain.outcomes, *plain.guesses], strict=True):
        assert ours.dtype == np.float32 and (ours == theirs).all()
    asymmetric = plain.outcomes.probabilities > 0.2  # e / (e + 9) = 0.23, where the halves differ; else 0.1
    assert plain.metrics["val_top1_count"] > 0 and asymmetric.mean() > 0.9
    assert viewed.metrics["views_val_top1_count"] == 0  # 1 and 2 tie
    halves = np.isin(plain.outcomes.labels, (1, 2)) & asymmetric  # logits of 1/2 for both
    loss = np.where(asymmetric, np.log(2 * math.exp(0.5) + 8) - 0.5 * halves, math.log(10))
    assert viewed.metrics["views_val_loss"] == pytest.approx(loss.mean(), rel=1e-6)
    assert viewed.metrics["views_val_top5_count"] == np.sum(halves)
