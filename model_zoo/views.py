"""The mean of a network's predictions over views of each image, such as its mirror image (test-time augmentation)."""
import tensorflow as tf


def mean_logits(logits_of, images, views: int, own: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the weighted mean of the logits of an image's views, float32 (batch, classes).

    The views are those of airbench's evaluation (arXiv:2404.00498, "multi-crop"). 1: the image. 2: and its mirror
    image, with 1/2 each. 6: these two with 1/4 each, and both shifted by one pixel to the upper left and to the lower
    right with 1/8 each. The border of a shifted image is reflected; the edge is not repeated.

    logits_of: function of images. images: (batch, height, width, channels). views: 1, 2 or 6. own: logits of the images
    themselves, float32, if they are known.
    """
    weighted = [(images, 1.0)]
    if views == 6:
        height, width = images.shape[1:3]
        taller = tf.concat([images[:, 1:2], images, images[:, -2:-1]], axis=1)  # tf.pad has no uint8 on a GPU
        padded = tf.concat([taller[:, :, 1:2], taller, taller[:, :, -2:-1]], axis=2)
        shifted = [(padded[:, start:start + height, start:start + width], 0.25) for start in (2, 0)]
        weighted = [(images, 0.5), *shifted]
    if views > 1:
        weighted = [(one, weight / 2) for view, weight in weighted for one in (view, view[:, :, ::-1])]
    (_, first), *others = weighted
    own = tf.cast(logits_of(images), tf.float32) if own is None else own
    return tf.add_n([first * own, *(weight * tf.cast(logits_of(view), tf.float32) for view, weight in others)])
