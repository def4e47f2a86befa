"""The evaluation of a model whose answers are known, beside an average of its weights that answers otherwise."""
import math

import numpy as np
import pytest

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
    feed = Feed(open_dataset(digits), 8, "none", 0)
    found, alone = (Evaluator(model, feed, 32, World(), one)() for one in (average, None))
    assert (found.outcomes[:, 1] == 3).all() and (alone.outcomes[:, 1] == 1).all()
    assert found.outcomes[:, 4] == pytest.approx(math.e / (math.e + 9), rel=1e-6)  # softmax of one 1 and nine 0
    ones, threes = (np.sum(found.outcomes[:, 0] == label) for label in (1, 3))
    assert (found.metrics["val_top1_count"], found.metrics["ema_val_top1_count"]) == (ones, threes)
