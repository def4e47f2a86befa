"""Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899), which combine pairs of training images and their labels.

Positions 2k and 2k + 1 of a global batch are a pair. Both images get the same weight and the same rectangle. These are
a function of the seed and of the pair's position in the endless stream (order.py), so any number of workers sees the
same pairs. This does not hold for formats that are read file by file: their pairs depend on the number of workers,
because their batches do.
"""
from dataclasses import dataclass

import numpy as np

from data.randomness import Purpose, uniforms

# Columns of a sample's row.
# pixels: weight of its own pixels outside the rectangle; inside, it is 0.
# label: weight of its own label.
# top, left, bottom, right: of the rectangle in pixels; bottom and right are exclusive.
COLUMNS = ("pixels", "label", "top", "left", "bottom", "right")
BOTH = 0.5  # probability of CutMix if both are used


@dataclass(frozen=True)
class Mixing:
    """The strength of mixup and CutMix. If both are on, each pair uses one of them.

    mixup, cutmix: alpha of Beta(alpha, alpha), from which a sample's own weight is sampled. 0: off.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def __bool__(self):
        return bool(self.mixup or self.cutmix)

    def random_numbers(self, image_size: int, seed: int, positions: np.ndarray) -> np.ndarray:
        """Returns one row of COLUMNS for each sample at these positions of the stream, float32 (positions, 6).

        positions: whole pairs of a global batch, as p + 2k, p + 2k + 1, p + 2j, p + 2j + 1, ...; p: that of its first.
        """
        u = uniforms(seed, Purpose.MIXING, positions, 4)[::2]
        cuts = u[:, 0] < (BOTH if self.mixup else 1.0) if self.cutmix else np.zeros(len(u), bool)
        rows = np.zeros((len(u), len(COLUMNS)))
        rows[~cuts, 0] = rows[~cuts, 1] = beta(self.mixup, u[~cuts, 1])
        rows[cuts, 0] = 1.0
        corners = rectangles(image_size, 1 - beta(self.cutmix, u[cuts, 1]), u[cuts, 2:])
        rows[cuts, 2:] = corners
        rows[cuts, 1] = 1 - np.prod(corners[:, 2:] - corners[:, :2], axis=1) / image_size ** 2
        return np.repeat(rows, 2, axis=0).astype(np.float32)


NOT_MIXED = Mixing()


def beta(alpha: float, uniform: np.ndarray) -> np.ndarray:
    """Turns uniform random numbers into numbers from Beta(alpha, alpha), through the inverse of its distribution."""
    from scipy.special import betaincinv

    return betaincinv(alpha, alpha, uniform) if len(uniform) else uniform


def rectangles(image_size: int, area: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Returns top, left, bottom and right of rectangles, clipped to the image, int (count, 4).

    area: fraction of the image before clipping, (count,). centre: (vertical, horizontal), as fractions of the image's
    height and width, (count, 2). Section 3.1 of arXiv:1905.04899.
    """
    half = (image_size * np.sqrt(area)).astype(int)[:, None] // 2
    middle = (image_size * centre).astype(int)
    return np.clip(np.concatenate([middle - half, middle + half], axis=1), 0, image_size)


def partners(tensor):
    """Returns each sample's partner: rows 2k and 2k + 1 exchanged."""
    import tensorflow as tf

    pairs = tf.reshape(tensor, [-1, 2, *tensor.shape[1:]])
    return tf.reshape(tf.reverse(pairs, [1]), tf.shape(tensor))


def mixed(images, rows):
    """Returns the mixed images, float32. images: (batch, height, width, 3). rows: of Mixing.random_numbers."""
    import tensorflow as tf

    pixels, _, top, left, bottom, right = (column[:, None, None, None] for column in tf.unstack(rows, axis=1))
    down = tf.range(images.shape[1], dtype=tf.float32)[None, :, None, None]
    across = tf.range(images.shape[2], dtype=tf.float32)[None, None, :, None]
    inside = (down >= top) & (down < bottom) & (across >= left) & (across < right)
    images = tf.cast(images, tf.float32)
    own = tf.where(inside, 0.0, pixels)
    return own * images + (1 - own) * partners(images)


def label_weight(rows):
    """Returns the weight of each sample's own label; its partner's label has the rest. float32 (batch,)."""
    return rows[:, COLUMNS.index("label")]
