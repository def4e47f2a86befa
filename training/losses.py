"""The loss of a sample, and whether it is among the best guesses."""
import tensorflow as tf


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


def rivals_of(logits, labels) -> tf.Tensor:
    """Returns how many other classes have a logit at least as large as that of the label, float32 (batch,).

    The label is among the k largest logits if there are fewer than k rivals. So ties count as misses; with
    tf.math.in_top_k, a network with constant logits would always be right. With a NaN, all classes are rivals.
    """
    own = tf.gather(logits, labels[:, None], batch_dims=1)
    smaller = tf.reduce_sum(tf.cast(logits < own, tf.float32), axis=1)
    rivals = logits.shape[-1] - 1 - smaller
    return tf.where(tf.reduce_any(tf.math.is_nan(logits), axis=1), float(logits.shape[-1]), rivals)
