"""The mean of the logits over views of an image, against NumPy in float64."""
import numpy as np
import pytest
import tensorflow as tf

from model_zoo.views import mean_logits

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (2, 5, 4, 3), dtype=np.uint8)
KERNEL = RANDOM.normal(size=(5 * 4 * 3, 7))


def logits_of(images) -> np.ndarray:
    return (np.asarray(images, np.float64).reshape(len(images), -1) / 255) ** 2 @ KERNEL


def expected(views: int) -> np.ndarray:
    """By hand: NumPy's reflection does not repeat the edge either."""
    padded = np.pad(IMAGES, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    shifted = padded[:, 2:, 2:], padded[:, :-2, :-2]  # to the upper left, to the lower right
    both = [(logits_of(images) + logits_of(np.flip(images, axis=2))) / 2 for images in (IMAGES, *shifted)]
    return {1: logits_of(IMAGES), 2: both[0], 6: both[0] / 2 + both[1] / 4 + both[2] / 4}[views]


@pytest.mark.parametrize("views", [1, 2, 6])
def test_the_mean_is_numpys(views):
    found = mean_logits(lambda images: tf.convert_to_tensor(logits_of(images)), tf.constant(IMAGES), views)
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, expected(views), rtol=1e-5)


def test_the_views_differ():
    assert all(np.abs(expected(one) - expected(other)).max() > 0.1 for one, other in ((1, 2), (2, 6)))
