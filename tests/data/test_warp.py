"""Resampling by a matrix, against float64 NumPy: sizes, borders and mirrored images; what DALI's operator promises."""
import inspect
import io
import itertools

import numpy as np
import pytest
from PIL import Image

from data import pipeline
from data.augmentation import Augmentation, by_name
from data.warp import warped
from tests.data.test_augmentation import bilinear, by_columns

SIZES = [(1, 1), (1, 9), (9, 1), (2, 3), (20, 50), (50, 20), (33, 33), (40, 31), (66, 132), (501, 375)]
SIZE = 33


def image(height, width):
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3)).astype(np.uint8)


def run(batches, graph):
    """The outputs of a graph for one batch of each input, as lists of arrays."""
    from nvidia.dali import Pipeline, fn

    made = Pipeline(batch_size=len(batches[0]), num_threads=1, device_id=None)
    with made:
        made.set_outputs(graph(*(fn.external_source(source=itertools.repeat(batch), batch=True) for batch in batches)))
    made.build()
    return [np.array(one).astype(np.float64) for one in made.run()[0]]


def resized(picture, mirrored):
    """float64 (SIZE, SIZE, channels): the middle of each pixel of the result, in pixels of the picture."""
    y, x = (np.mgrid[:SIZE, :SIZE] + 0.5) * (np.array(picture.shape[:2]) / SIZE)[:, None, None]
    return bilinear(picture.astype(np.float64), picture.shape[1] - x if mirrored else x, y)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("mirrored", [0, 1])
def test_resizing_and_mirroring(mode, mirrored):
    """To the rounding of the exact value, smaller and larger, without a bias."""
    pictures = [np.asarray(Image.fromarray(image(*size)).convert(mode).convert("RGB")) for size in SIZES]
    files = []
    for picture in pictures:
        file = io.BytesIO()
        Image.fromarray(picture).convert(mode).save(file, "PNG")
        files.append(np.frombuffer(file.getvalue(), np.uint8))
    recipe = Augmentation(area=(1.0, 1.0), aspect=(1.0, 1.0), enlarge=None, flip=True)  # all of each image
    rows = np.stack([by_columns(recipe, area=1.0, sides=1.0, mirror=mirrored)] * len(files))
    found = run([files, rows], lambda encoded, numbers: pipeline.augmented(
        encoded, by_name(recipe, numbers), pipeline.Transform(SIZE, recipe)))
    off = [one - resized(picture, mirrored) for one, picture in zip(found, pictures, strict=True)]
    assert max(np.abs(one).max() for one in off) <= 0.501 and abs(np.mean(off)) < 0.005


@pytest.mark.parametrize(("down", "right"), [(0, 0), (0, 1), (1, 0), (1, 1), (0.5, 0.5)])
def test_a_crop_at_each_border(down, right):
    """A quarter of 40 x 60 pixels: the result is that of the crop alone, whose own border is repeated."""
    picture = image(40, 60)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    recipe = Augmentation(area=(0.25, 0.25), enlarge=None)
    rows = by_columns(recipe, sides=1.0, offset=np.array([down, right]))[None]
    [found] = run([[np.frombuffer(file.getvalue(), np.uint8)], rows], lambda encoded, numbers: pipeline.augmented(
        encoded, by_name(recipe, numbers), pipeline.Transform(SIZE, recipe)))
    top, left = int(20 * down), int(30 * right)
    assert np.abs(found - resized(picture[top:top + 20, left:left + 30], mirrored=False)).max() <= 0.501


@pytest.mark.parametrize("fill", [None, 128.0])
@pytest.mark.parametrize("as_float", [False, True])
def test_any_matrix(fill, as_float):
    """A turn and a shear that leave the image on all sides. It lies in a border of `fill`, or in its own, repeated."""
    rows = np.array([[1.7, -0.6, 4.5], [0.8, 1.3, -9.25]], np.float32)
    pictures = [image(*size) for size in SIZES]
    found = run([pictures], lambda images: warped(images, [*map(float, rows[0])], [*map(float, rows[1])], SIZE,
                                                  fill=fill, as_float=as_float))
    y, x = np.mgrid[:SIZE, :SIZE] + 0.5
    for one, picture in zip(found, pictures, strict=True):
        margin = 0 if fill is None else 100
        around = np.full((picture.shape[0] + 2 * margin, picture.shape[1] + 2 * margin, 3), fill or 0, np.float64)
        around[margin:margin + picture.shape[0], margin:margin + picture.shape[1]] = picture
        expected = bilinear(around, *(a * x + b * y + c + margin for a, b, c in rows.astype(np.float64)))
        assert np.abs(one - expected).max() <= (0.01 if as_float else 0.51)


def test_the_operator_is_the_one_that_was_measured():
    """DALI calls it experimental. Another signature, or other pixels in the tests above, come with an upgrade."""
    from nvidia.dali import fn

    parameters = inspect.signature(fn.experimental.warp_perspective).parameters
    assert {name: parameters[name].default for name in ("inverse_map", "pixel_origin", "border_mode")} == {
        "inverse_map": True, "pixel_origin": "corner", "border_mode": "constant"}
