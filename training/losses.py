"""The training losses, and the rank of the label among the logits, of which top-1 and top-5 are counted."""
import functools
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from data import mixing

PRESENT = 0.2  # target above which a class counts as present in an image: target_thresh of arXiv:2110.00476's recipes


def make_loss(name: str, label_smoothing: float, class_weights: np.ndarray | None = None) -> Callable:
    """Returns the training loss: a function of (logits, labels, rows), such as `cross_entropy`.

    name: value of --loss. class_weights: float32 (classes,), or None.
    """
    losses = {"cross_entropy": cross_entropy, "binary_cross_entropy": binary_cross_entropy}
    return functools.partial(losses[name], label_smoothing=label_smoothing, class_weights=class_weights)


def balancing_weights(images: np.ndarray, power: float) -> np.ndarray:
    """Returns images ** -power of each class, scaled to a mean of 1 over all images; float32 (classes,).

    images: number of training images of each class. A class without images has the weight of one with a single image.
    """
    weights = np.maximum(images, 1.0) ** -power
    return (weights * images.sum() / np.dot(weights, images)).astype(np.float32)


def loss_of_guessing(name: str, classes: int, class_weights: np.ndarray | None = None) -> float:
    """Returns the training loss of a network whose logits are all 0.

    With class weights, it is the highest of any batch: that of samples of the class with the largest weight. Label
    smoothing and mixing do not change it. name: value of --loss. class_weights: as in `make_loss`.
    """
    loss = math.log(2 if name == "binary_cross_entropy" else max(classes, 2))
    return loss if class_weights is None else loss * float(class_weights.max())


def cross_entropy(logits, labels, rows=None, label_smoothing: float = 0.0, class_weights=None):
    """Returns the loss of each sample, float32 (batch,). rows: of Mixing.random_numbers, or None for unmixed images.

    class_weights: by which the loss with a label is multiplied, float32 (classes,), or None.

    Label smoothing follows arXiv:1512.00567, section 7: the target is 1 - e + e / classes for the label and e / classes
    for any other class. The loss of a mixed image is the mean of the losses with both labels, by their weights.
    """
    if rows is not None:
        weight = mixing.label_weight(rows)
        own, other = (cross_entropy(logits, one, None, label_smoothing, class_weights)
                      for one in (labels, mixing.partners(labels)))
        return weight * own + (1 - weight) * other
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.softmax_cross_entropy_with_logits(
        _smoothed(labels, logits.shape[-1], label_smoothing), logits) if label_smoothing else (
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return losses if class_weights is None else tf.gather(class_weights, labels) * losses


def binary_cross_entropy(logits, labels, rows=None, label_smoothing: float = 0.0, class_weights=None):
    """Returns the mean over the classes of whether each is present in the image, float32 (batch,): a sigmoid per class.

    The target is 1 for a class that the smoothed and mixed label gives more than PRESENT, and 0 for the others, as in
    timm. Smoothing thus only changes which share of a mixed image makes a class present. rows: as in cross_entropy.
    class_weights: the loss of a sample is multiplied by those of its labels, averaged like the labels; or None.
    """
    def mixed(values):
        if rows is None:
            return values
        weight = tf.reshape(mixing.label_weight(rows), [-1] + [1] * (len(values.shape) - 1))
        return weight * values + (1 - weight) * mixing.partners(values)

    present = tf.cast(mixed(_smoothed(labels, logits.shape[-1], label_smoothing)) > PRESENT, tf.float32)
    losses = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(present, tf.cast(logits, tf.float32)), axis=1)
    return losses if class_weights is None else mixed(tf.gather(class_weights, labels)) * losses


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
