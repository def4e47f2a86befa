"""The training losses, and the rank of the label among the logits, of which top-1 and top-5 are counted."""
import functools
import math
from collections.abc import Callable

import tensorflow as tf

from data import mixing

PRESENT = 0.2  # target above which a class counts as present in an image: target_thresh of arXiv:2110.00476's recipes


def make_loss(name: str, label_smoothing: float) -> Callable:
    """Returns the training loss: a function of (logits, labels, rows), such as `cross_entropy`.

    name: value of --loss.
    """
    losses = {"cross_entropy": cross_entropy, "binary_cross_entropy": binary_cross_entropy}
    return functools.partial(losses[name], label_smoothing=label_smoothing)


def loss_of_guessing(name: str, classes: int) -> float:
    """Returns the training loss of a network whose logits are all 0. name: value of --loss."""
    return math.log(2 if name == "binary_cross_entropy" else max(classes, 2))


def cross_entropy(logits, labels, rows=None, label_smoothing: float = 0.0):
    """Returns the loss of each sample, float32 (batch,). rows: of Mixing.random_numbers, or None for unmixed images.

    Label smoothing follows arXiv:1512.00567, section 7: the target is 1 - e + e / classes for the label and e / classes
    for any other class. The loss of a mixed image is the mean of the losses with both labels, by their weights.
    """
    if rows is not None:
        weight = mixing.label_weight(rows)
        return (weight * cross_entropy(logits, labels, None, label_smoothing)
                + (1 - weight) * cross_entropy(logits, mixing.partners(labels), None, label_smoothing))
    logits = tf.cast(logits, tf.float32)
    if not label_smoothing:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.nn.softmax_cross_entropy_with_logits(_smoothed(labels, logits.shape[-1], label_smoothing), logits)


def binary_cross_entropy(logits, labels, rows=None, label_smoothing: float = 0.0):
    """Returns the mean over the classes of whether each is present in the image, float32 (batch,): a sigmoid per class.

    The target is 1 for a class that the smoothed and mixed label gives more than PRESENT, and 0 for the others, as in
    timm. Smoothing thus only changes which share of a mixed image makes a class present. rows: as in cross_entropy.
    """
    targets = _smoothed(labels, logits.shape[-1], label_smoothing)
    if rows is not None:
        weight = mixing.label_weight(rows)[:, None]
        targets = weight * targets + (1 - weight) * mixing.partners(targets)
    present = tf.cast(targets > PRESENT, tf.float32)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(present, tf.cast(logits, tf.float32)), axis=1)


def _smoothed(labels, classes: int, label_smoothing: float):
    """Returns the targets of labels, float32 (batch, classes)."""
    return tf.one_hot(labels, classes) * (1 - label_smoothing) + label_smoothing / classes


def label_ranks(logits, labels) -> tf.Tensor:
    """Returns how many other classes have a logit at least as large as that of the label, float32 (batch,).

    The label is among the k largest logits if its rank is less than k. So ties count as misses. With tf.math.in_top_k,
    a network with constant logits would always be right. If a logit is NaN, the rank is the number of classes.
    """
    own = tf.gather(logits, labels[:, None], batch_dims=1)
    smaller = tf.reduce_sum(tf.cast(logits < own, tf.float32), axis=1)
    ranks = logits.shape[-1] - 1 - smaller
    return tf.where(tf.reduce_any(tf.math.is_nan(logits), axis=1), float(logits.shape[-1]), ranks)
