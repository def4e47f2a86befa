"""RandAugment: operations, against Pillow's at timm's parameters; random numbers; what any number of shards makes."""
import dataclasses
import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats

from common.errors import UsageError
from data import pipeline
from data.augmentation import AUGMENTATIONS, Augmentation, random_numbers
from data.dataset import open_dataset
from data.feed import Feed
from data.pipeline import DecoderSettings
from data.rand_augment import NAMES, RandAugment, parameters
from plan.flags import parse
from tests.data.test_augmentation import operators

SIZE, GREY = 48, (128, 128, 128)
LEVELS = (1.3, 6.0, 9.7)
A3 = RandAugment(6, 2, 0.5)
CROP = AUGMENTATIONS["crop"].followed_by(A3)


def moved(picture, matrix):
    return picture.transform(picture.size, Image.AFFINE, matrix, resample=Image.BILINEAR, fillcolor=GREY)


def enhanced(kind):
    return lambda picture, level, sign: kind(picture).enhance(max(0.1, 1 + sign * level / 10 * 0.9))


# What timm calls for `inc1`, by hand: a picture, a level from 0 to 10, a sign. Where an operation turns or moves, the
# sign is a matter of convention, as both are drawn alike.
PILLOW = {
    "auto_contrast": lambda picture, level, sign: ImageOps.autocontrast(picture),
    "equalize": lambda picture, level, sign: ImageOps.equalize(picture),
    "invert": lambda picture, level, sign: ImageOps.invert(picture),
    "rotate": lambda picture, level, sign: picture.rotate(sign * level * 3, resample=Image.BILINEAR, fillcolor=GREY),
    "posterize": lambda picture, level, sign: ImageOps.posterize(picture, 4 - int(level / 10 * 4)),
    "solarize": lambda picture, level, sign: ImageOps.solarize(picture, 256 - int(level / 10 * 256)),
    "solarize_add": lambda picture, level, sign: picture.point(
        [value + int(level / 10 * 110) if value < 128 else value for value in range(256)] * 3),
    "color": enhanced(ImageEnhance.Color), "contrast": enhanced(ImageEnhance.Contrast),
    "brightness": enhanced(ImageEnhance.Brightness), "sharpness": enhanced(ImageEnhance.Sharpness),
    "shear_x": lambda picture, level, sign: moved(picture, (1, -sign * level * 0.03, 0, 0, 1, 0)),
    "shear_y": lambda picture, level, sign: moved(picture, (1, 0, 0, -sign * level * 0.03, 1, 0)),
    "translate_x": lambda picture, level, sign: moved(picture, (1, 0, -sign * level * 0.045 * SIZE, 0, 1, 0)),
    "translate_y": lambda picture, level, sign: moved(picture, (1, 0, 0, 0, 1, -sign * level * 0.045 * SIZE)),
    "identity": lambda picture, level, sign: picture,
}
EXACT = {"invert", "posterize", "solarize", "solarize_add", "identity"}
MOVED = {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"}


def pictures(size):
    """Two smooth pictures, and one with pixels of all values."""
    random = np.random.default_rng(5)
    down, across = np.mgrid[:size, :size] / max(1, size - 1)
    smooth = [130 + 90 * np.sin(3 * down * a + 2 * across * b)[..., None] * [1, 0.6, -0.8]
              for a, b in ((1, 2), (2, -1))]
    return [*(one.astype(np.uint8) for one in smooth), random.integers(0, 256, (size, size, 3)).astype(np.uint8)]


def run(images, operations, mode="RGB"):
    """What the pipeline makes of images. operations: (name, level, sign) of each image, one after another."""
    from nvidia.dali import fn

    size, count = images[0].shape[0], len(operations[0])
    encoded = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).convert(mode).save(file, "PNG")
        encoded.append(np.frombuffer(file.getvalue(), np.uint8))
    rows = np.zeros((len(images), 2 * count), np.float32)
    for row, steps in zip(rows, operations, strict=True):
        for step, (name, level, sign) in enumerate(steps):
            index = np.array(NAMES.index(name))
            row[2 * step:][:2] = index, parameters(index, level / 10, sign, size)
    recipe = dataclasses.replace(AUGMENTATIONS["none"], operations=RandAugment(6, count))
    labels = np.zeros((len(images), 1), np.int64)
    readers = pipeline.Readers(lambda: (fn.external_source(lambda: encoded), fn.external_source(lambda: labels)),
                               lambda: fn.external_source(lambda: rows))
    made = pipeline.build_pipeline(readers, pipeline.Transform(size, recipe), len(images), first_label=0)
    made.build()
    return made.run()[0].as_array().astype(int)


def test_every_operation_against_pillow():
    """At three magnitudes and both signs. Not equal: rounding, and one pixel at an edge."""
    cases = [(name, level, sign, number) for name in NAMES if name != "equalize" for level in LEVELS
             for sign in (-1, 1) for number in range(3)]
    images = pictures(SIZE)
    found = run([images[number] for *_, number in cases], [[case[:3]] for case in cases])
    for case, mine in zip(cases, found, strict=True):
        *operation, number = case
        off = np.abs(mine - np.asarray(apply(Image.fromarray(images[number]), operation)))
        if case[0] == "sharpness":  # Pillow leaves the edge as it is
            off = off[1:-1, 1:-1]
        elif case[0] in MOVED:  # DALI blends what lies at the edge with grey
            is_outside = np.asarray(apply(Image.new("RGB", (SIZE, SIZE)), operation))[..., 0] == 128
            around = [is_outside[1 + down:SIZE - 1 + down, 1 + across:SIZE - 1 + across]
                      for down in (-1, 0, 1) for across in (-1, 0, 1)]
            off = off[1:-1, 1:-1][np.all(around, axis=0) | ~np.any(around, axis=0)]
            assert off.size > 0.8 * mine.size
        assert off.max() <= (0 if case[0] in EXACT else 2), (case, off.max())
        assert off.mean() < 1, case


def apply(picture, operation):
    name, level, sign = operation
    return PILLOW[name](picture, level, sign)


def test_equalize_is_opencvs():
    """It leaves the pixels of the first value out of the count, Pillow those of the last: nearly the same in photos."""
    images = pictures(224)
    for image, mine in zip(images, run(images, [[("equalize", 6, 1)]] * 3), strict=True):
        for channel in range(3):
            counted = np.bincount(image[..., channel].ravel(), minlength=256)
            first = counted[counted > 0][0]
            values = np.round((np.cumsum(counted) - first) / (224 ** 2 - first) * 255)
            assert np.abs(values[image[..., channel]] - mine[..., channel]).max() <= 1
    assert np.abs(np.asarray(ImageOps.equalize(Image.fromarray(images[2]))) - mine).max() <= 2


def test_operations_follow_one_another():
    image, steps = pictures(16)[2], [("solarize", 6, 1), ("posterize", 9, 1), ("invert", 3, 1)]
    for order in (steps, steps[::-1]):
        expected = Image.fromarray(image)
        for operation in order:
            expected = apply(expected, operation)
        np.testing.assert_array_equal(run([image], [order])[0], expected)
    assert (run([image], [steps]) != run([image], [steps[::-1]])).any()


@pytest.mark.parametrize("size", [1, 2, 16])
def test_grey_and_tiny_images(size):
    """Grey ones stay grey."""
    cases = [[(name, 9, sign)] for name in NAMES for sign in (-1, 1)]
    found = run(pictures(size)[:1] * len(cases), cases, mode="L")
    assert found.shape == (len(cases), size, size, 3) and (found == found[..., :1]).all()


def drawn(recipe=A3, count=60_000, seed=3, start=0):
    """Index and parameter of each operation, (samples, operations, 2)."""
    rows = random_numbers(Augmentation(operations=recipe), 100, seed, start + np.arange(count))
    assert rows.dtype == np.float32 and rows.shape == (count, 2 * recipe.count)
    return rows.reshape(count, recipe.count, 2)


def test_each_operation_is_drawn_with_the_same_probability():
    """A chosen operation is applied with probability 0.5, so that 1 / 30 is left for each of the 15."""
    found = drawn()
    for layer in range(2):
        counted = np.bincount(found[:, layer, 0].astype(int), minlength=len(NAMES)) / len(found)
        np.testing.assert_allclose(counted, [1 / 30] * 15 + [1 / 2], atol=0.004)
    assert np.abs(np.corrcoef(found.reshape(len(found), 4).T) - np.eye(4))[:2, 2:].max() < 0.02  # of the two operations


@pytest.mark.parametrize(("name", "largest"), [("rotate", 30), ("shear_y", 0.3), ("translate_x", 45)])
def test_magnitudes_are_normal_and_have_either_sign(name, largest):
    found = drawn()
    values = found[found[..., 0] == NAMES.index(name)][:, 1] / largest * 10
    assert stats.kstest(np.abs(values), stats.norm(6, 0.5).cdf).pvalue > 1e-3
    assert (values > 0).mean() == pytest.approx(0.5, abs=0.04)
    values = np.abs(found := drawn(RandAugment(10, 1, 1.0)))[found[..., 0] == NAMES.index(name)][:, 1] / largest * 10
    assert values.max() == pytest.approx(10) and (values > 9.99).mean() == pytest.approx(0.5, abs=0.05)
    values = np.abs(found := drawn(RandAugment(4, 3)))[found[..., 0] == NAMES.index(name)][:, 1] / largest * 10
    np.testing.assert_allclose(values, 4, rtol=1e-5)


def test_the_numbers_follow_from_seed_and_position_and_leave_the_others_alone():
    everything = drawn(count=200)
    np.testing.assert_array_equal(drawn(count=50, start=120), everything[120:170])
    assert (drawn(count=200, seed=4) != everything).any(axis=(1, 2)).mean() > 0.7
    recipe, positions = AUGMENTATIONS["nnabla"], np.arange(90)
    np.testing.assert_array_equal(
        random_numbers(recipe.followed_by(A3), 64, 1, positions)[:, :-4], random_numbers(recipe, 64, 1, positions))


@pytest.mark.trainings
def test_every_number_of_shards_has_the_same_images(digits):
    def images(shards, micro_batch_size, recipe=CROP):
        feed, found = Feed(open_dataset(digits), 16, recipe, seed=3, shards=shards), {}
        for shard in range(shards):
            with dataclasses.replace(feed, shard=shard).train(7, 4, 24, micro_batch_size) as batches:
                found |= {image.tobytes(): 1 for _ in range(4 * 24 // shards // micro_batch_size)
                          for image in next(batches)[0].numpy()}
        return {*found}

    alone = images(1, 12)
    assert len(alone) == 96 and images(2, 4) == alone == images(4, 6)
    assert 12 < len(alone & images(1, 12, AUGMENTATIONS["crop"])) < 48  # a quarter has no operation


@pytest.mark.parametrize("recipe", [None, A3])
def test_only_pipelines_with_it_have_conditionals_and_its_operators_exist_for_gpus(recipe):
    from nvidia.dali import fn

    transform = pipeline.Transform(32, dataclasses.replace(AUGMENTATIONS["crop"], operations=recipe),
                                   DecoderSettings("gpu", 0, 2, 0.9))
    readers = pipeline.Readers(lambda: (fn.external_source(name="encoded"), fn.external_source(name="label")),
                               lambda: fn.external_source(name="numbers"))
    made = pipeline.build_pipeline(readers, transform, 4, first_label=1)
    assert made._conditionals_enabled == bool(recipe)
    found, needed = operators(made), {(name, "gpu") for name in (
        "WarpAffine", "Rotate", "Brightness", "Hsv", "Saturation", "Equalize", "Filter")}
    assert [edge.device for edge in made._graph_out] == ["gpu", "gpu"]
    assert len(needed & found) == (6 if recipe else 0), found
    assert any("Split" in name for name, _ in found) == bool(recipe)


@pytest.mark.parametrize(("text", "message"), [
    ("m6-n16-mstd0.5-inc1", "n from 1 to 15, as there are 15 operations"), ("m6-n0-inc1", "n from 1 to 15"),
    ("m11-inc1", "the magnitude is at most 10"), ("m6-n2-mstd0.5", "of the form m6-n2-mstd0.5-inc1"),
    ("m6-w0-inc1", "of the form"), ("rand", "of the form")])
def test_a_wrong_value_is_one_line(text, message):
    with pytest.raises(UsageError, match=message) as raised:
        parse(["train.py", f"--rand_augment={text}"])
    assert "\n" not in str(raised.value)


def test_timms_notation():
    assert RandAugment.parse("m7-n2-mstd0.5-inc1") == RandAugment(7, 2, 0.5)
    assert RandAugment.parse("rand-m7-mstd0.5-inc1") == RandAugment(7, 2, 0.5)
    assert RandAugment.parse("none") is None and RandAugment.parse("m9-n3-inc1") == RandAugment(9, 3, 0.0)
