"""A sample's random numbers and what DALI makes of it, against NumPy; the graph for a GPU as far as none is needed."""
import dataclasses
import io
import itertools
import json
import re
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

from common.errors import UserError
from data import augmentation, pipeline
from data.augmentation import AUGMENTATIONS, Augmentation, random_numbers
from data.pipeline import DecoderSettings
from data.rand_augment import RandAugment
from data.randomness import Purpose, uniforms

SIZES = np.array([[375, 500], [500, 375], [32, 32], [100, 1000], [1000, 90], [1, 1], [3, 400], [227, 256]], np.float32)


def encoded(picture) -> bytes:
    output = io.BytesIO()
    Image.fromarray(picture).save(output, "PNG")
    return output.getvalue()


def written(folder, pictures, mean=(0, 0, 0)):
    """A dataset whose images of both splits are these pictures."""
    from data.dataset import open_dataset
    from data.formats import tfrecord

    tfrecord.write(folder / "t.tfrecord", [(encoded(one), 0) for one in pictures])
    split = {"samples": len(pictures), "files": [{"path": "t.tfrecord", "samples": len(pictures)}]}
    (folder / "dataset.json").write_text(json.dumps({
        "format": "tfrecord", "classes": ["a"], "train": split, "validation": split,
        "image": {"mean": mean, "std": [1, 1, 1]}}))
    return open_dataset(folder)


def noise(count, height, width):
    return np.random.default_rng(1).integers(0, 256, (count, height, width, 3)).astype(np.uint8)


def widths(recipe) -> dict[str, int]:
    """Of the columns that an augmentation needs."""
    return {name: values.size for name, values in augmentation.columns(recipe, 1, 0, np.arange(1)).items()}


def columns(name, size, seed, positions, mirrored=None):
    """The columns of random_numbers by name."""
    recipe = AUGMENTATIONS[name] if isinstance(name, str) else name
    rows = random_numbers(recipe, size, seed, positions, mirrored)
    return dict(zip(found := widths(recipe), np.split(rows, np.cumsum([*found.values()])[:-1], axis=1), strict=True))


def by_columns(recipe, **values):
    """A sample's random numbers, 0 but for these."""
    return np.concatenate([np.broadcast_to(np.float32(values.get(name, 0)), width)
                           for name, width in widths(recipe).items()])


NEEDED = {  # what each augmentation reads
    "none": [], "crop": ["area", "offset", "sides"], "crop_flip": ["area", "offset", "sides", "mirror"],
    "crop_flip_95": ["area", "offset", "sides", "mirror"], "crop_flip_mild": ["area", "offset", "sides", "mirror"],
    "resnet": ["area", "offset", "mirror", "colour"], "caffe": ["offset", "mirror"], "alexnet": ["offset", "mirror"],
    "pad_crop_flip": ["mirror", "corner"], "reflect_crop_alternate_flip": ["mirror", "corner"],
    "nnabla": ["offset", "warp", "shorter", "reach", "brightness", "contrast", "noise", "noise_offset"]}


def test_an_augmentation_carries_only_the_columns_that_it_reads():
    assert {name: [*widths(recipe)] for name, recipe in AUGMENTATIONS.items()} == NEEDED


@pytest.mark.parametrize("name", [name for name, recipe in AUGMENTATIONS.items() if recipe.random])
def test_numbers_follow_from_the_position(name):
    rows = random_numbers(AUGMENTATIONS[name], 224, seed=3, positions=np.arange(200))
    assert rows.dtype == np.float32 and rows.shape == (200, sum(widths(AUGMENTATIONS[name]).values()))
    for position in (1, 7, 100, 199):
        [row] = random_numbers(AUGMENTATIONS[name], 224, 3, position + np.arange(1))
        np.testing.assert_array_equal(row, rows[position])
    some = np.array([150, 3, 77])
    np.testing.assert_array_equal(random_numbers(AUGMENTATIONS[name], 224, 3, some), rows[some])
    assert (random_numbers(AUGMENTATIONS[name], 224, 4, np.arange(200)) != rows).any(axis=1).mean() > 0.9
    assert len(np.unique(rows, axis=0)) > 40  # of 50 for padding by two pixels


def test_numbers_lie_where_they_should():
    numbers = columns("nnabla", 224, 0, np.arange(20_000)) | columns("crop_flip", 224, 0, np.arange(20_000))
    numbers["log_contrast"], numbers["log_shorter"] = np.log(numbers["contrast"]), np.log(numbers["shorter"])
    for name, low, high in (("area", 0, 1), ("offset", 0, 1), ("noise_offset", 0, 1), ("brightness", -25.5, 25.5),
                            ("log_contrast", -np.log(1.1), np.log(1.1)), ("noise", 0, 25.5),
                            ("log_shorter", np.log(246.4), np.log(492.8))):
        values = numbers[name].astype(np.float64)
        assert values.min() >= low and values.max() <= high
        np.testing.assert_allclose(values.mean(axis=0), (low + high) / 2, atol=(high - low) * 0.01)
        np.testing.assert_allclose(values.var(axis=0), (high - low) ** 2 / 12, rtol=0.05)
    assert set(np.unique(numbers["mirror"])) == {0, 1} and abs(numbers["mirror"].mean() - 0.5) < 0.02
    aspect = np.log(numbers["sides"][:, 1] / numbers["sides"][:, 0])
    np.testing.assert_allclose([aspect.min(), aspect.max()], np.log([3 / 4, 4 / 3]), atol=0.01)
    np.testing.assert_allclose(numbers["sides"].prod(axis=1), 1, rtol=1e-5)
    assert abs(np.corrcoef(np.concatenate([numbers["area"], numbers["offset"], aspect[:, None]], axis=1).T)
               - np.eye(4)).max() < 0.03


@pytest.mark.parametrize(("name", "area", "aspect", "validated"), [  # validated: pixels of the shorter side for 224
    ("none", None, None, 224), ("crop", (0.7, 1), (0.85, 1.18), 224), ("crop_flip", (0.08, 1), (3 / 4, 4 / 3), 256),
    ("crop_flip_95", (0.08, 1), (3 / 4, 4 / 3), 235.8), ("crop_flip_mild", (0.7, 1), (0.85, 1.18), None)])
def test_crops_are_those_of_the_sources(name, area, aspect, validated):
    """8 to 100 % and 3/4 to 4/3: arXiv:1409.4842, section 6; 256 for 224 pixels: arXiv:1512.03385, 3.4."""
    augmentation = AUGMENTATIONS[name]
    assert augmentation.area == area and (area is None or augmentation.aspect == pytest.approx(aspect))
    assert augmentation.flip == ("flip" in name)
    assert augmentation.enlarge == (validated and pytest.approx(validated / 224, abs=1e-4))


def bilinear(image, x, y):
    """The image, float64 (height, width, 3), at positions of which pixel centres are at 0.5; its border is repeated."""
    x, y = x - 0.5, y - 0.5
    left, upper = np.floor(x).astype(int), np.floor(y).astype(int)
    result = 0.0
    for row, part in ((upper, 1 - (y - upper)), (upper + 1, y - upper)):
        for column, share in ((left, 1 - (x - left)), (left + 1, x - left)):
            pixels = image[np.clip(row, 0, image.shape[0] - 1), np.clip(column, 0, image.shape[1] - 1)]
            result = result + (part * share)[..., None] * pixels
    return result


def test_sonys_augmentation_against_numpy(tmp_path, monkeypatch):
    """Step by step for each pixel of the result: mirror, turn back, shrink, move, sample, colour; without the noise."""
    from data.feed import Feed

    monkeypatch.setattr(augmentation, "NOISE", 0.0)
    random, size, count = np.random.default_rng(0), 48, 32
    pictures = []
    for _ in range(count):
        height, width = random.integers(40, 200, 2)
        waves = random.uniform(0.02, 0.1, (3, 2))
        grid = np.mgrid[:height, :width]
        pictures.append(np.stack([127 + 120 * np.sin(a * grid[0] + b * grid[1]) for a, b in waves], 2).astype(np.uint8))
    with Feed(written(tmp_path, pictures), size, AUGMENTATIONS["nnabla"], 7).train(0, 1, count, count) as batches:
        found, samples = next(batches)[0].numpy().astype(np.float64), batches.samples
    u = uniforms(7, Purpose.AUGMENTATION, np.arange(count), 16)
    channels = uniforms(7, Purpose.CHANNELS, np.arange(count), 8)
    for result, sample, one, three in zip(found, samples, u, channels, strict=True):
        picture = pictures[sample].astype(np.float64)
        height, width = picture.shape[:2]
        scale = 1.1 * size * 2 ** one[6] / min(height, width)
        aspect, angle = 1.3 ** (one[7] - 0.5), one[5] - 0.5
        y, x = np.mgrid[:size, :size] + 0.5 - size / 2
        x = -x if one[4] < 0.5 else x
        x, y = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
        left = [max(0, width * scale * aspect - size), max(0, height * scale / aspect - size)]
        x = width / 2 + (x + left[0] * (one[2] - 0.5)) / (scale * aspect)
        y = height / 2 + (y + left[1] * (one[1] - 0.5)) / (scale / aspect)
        expected = bilinear(picture, x, y) + 25.5 * (2 * three[:3] - 1)
        expected = np.clip((expected - 128) * 1.1 ** (2 * three[3:6] - 1) + 128, 0, 255)
        assert np.abs(result - expected).max() <= 0.6


def test_noise_has_a_deviation_between_0_and_25(digits):
    from data.dataset import open_dataset
    from data.feed import Feed

    with Feed(open_dataset(digits), 32, AUGMENTATIONS["nnabla"], 0).train(0, 1, 256, 256) as batches:
        found = next(batches)[0].numpy().astype(np.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augmentation, "NOISE", 0.0)
        with Feed(open_dataset(digits), 32, AUGMENTATIONS["nnabla"], 0).train(0, 1, 256, 256) as batches:
            without = next(batches)[0].numpy().astype(np.float64)
    inside = (without > 80) & (without < 175)  # where nothing is clipped
    deviations = np.array([(one - other)[chosen].std()
                           for one, other, chosen in zip(found, without, inside, strict=True) if chosen.sum() > 100])
    assert len(deviations) > 50 and 20 < deviations.max() < 29 and deviations.min() < 3


CPU = DecoderSettings()
MEAN = (125.5, 122.49, 0.6)
COLOURS = {"mean": (126, 122, 1), "black": (0, 0, 0)}  # NumPy rounds 125.5 to the even number


def padded(image, filling, padding):
    """By numpy.pad."""
    if filling == "reflect":
        return np.pad(image, [(padding, padding)] * 2 + [(0, 0)], "reflect")
    return np.stack([np.pad(image[..., channel], padding, constant_values=colour)
                     for channel, colour in enumerate(COLOURS[filling])], axis=2)


def fed(dataset, recipe, size, shards=1, steps=2, device=CPU, **options):
    """Images of `steps` global batches of 32, and their numbers in the dataset; both in the order of the stream."""
    from data.feed import Feed

    images, samples = [], []
    for shard in range(shards):
        feed = Feed(dataset, size, recipe, 7, shard, shards, device, **options)
        with feed.train(0, steps, 32, 32 // shards) as batches:
            images.append([next(batches)[0].numpy() for _ in range(steps)])
            samples.append(batches.samples.reshape(steps, -1))
    return np.concatenate(images, axis=1).reshape(-1, size, size, 3), np.concatenate(samples, axis=1).reshape(-1)


@pytest.mark.parametrize(("shards", "device"), [
    (1, CPU), (2, CPU),
    pytest.param(1, DecoderSettings("gpu", 0, 2), marks=pytest.mark.gpu)], ids=["one", "two", "gpu"])
@pytest.mark.parametrize("filling", augmentation.FILLINGS)
def test_padding_and_crop_are_numpys_to_the_bit(filling, shards, device, tmp_path):
    pictures, padding = noise(40, 16, 16), 5
    recipe = Augmentation(padding=padding, filling=filling, flip=True)
    images, samples = fed(written(tmp_path, pictures, MEAN), recipe, 16, shards, device=device)
    u = uniforms(7, Purpose.AUGMENTATION, np.arange(64), 16)
    for image, sample, one in zip(images, samples, u, strict=True):
        picture = pictures[sample][:, ::-1] if one[4] < 0.5 else pictures[sample]
        down, right = (one[8:10] * 11).astype(int)
        np.testing.assert_array_equal(image, padded(picture, filling, padding)[down:down + 16, right:right + 16])


@pytest.mark.parametrize("filling", augmentation.FILLINGS)
def test_images_of_another_size_are_resized_before_they_are_padded(filling, tmp_path):
    """Against what the same training without padding has resized and mirrored."""
    dataset = written(tmp_path, [noise(1, *size)[0] for size in ((9, 9), (16, 16), (20, 31), (40, 17))], MEAN)
    resized, samples = fed(dataset, Augmentation(flip=True), 16)
    images, same = fed(dataset, Augmentation(padding=4, filling=filling, flip=True), 16)
    assert samples.tolist() == same.tolist()
    corners = (uniforms(7, Purpose.AUGMENTATION, np.arange(64), 16)[:, 8:10] * 9).astype(int)
    for image, before, (down, right) in zip(images, resized, corners, strict=True):
        np.testing.assert_array_equal(image, padded(before, filling, 4)[down:down + 16, right:right + 16])


def test_each_crop_of_a_padded_image_is_as_likely():
    corners = columns("pad_crop_flip", 32, 5, np.arange(81_000))["corner"]
    found, counts = np.unique(corners, axis=0, return_counts=True)
    assert found.tolist() == [[down, right] for down in range(-4, 5) for right in range(-4, 5)]
    assert np.abs(counts - 1000).max() < 5 * 1000 ** 0.5


@pytest.mark.parametrize(("fields", "message"), [
    ({"padding": -1}, "padding is -1, not a number of pixels from 0 on"),
    ({"padding": 2, "warp": True}, "padding is 2, .* or 0 with warp"),
    ({"padding": 2, "filling": "grey"}, "filling is 'grey', not one of mean, black, reflect"),
    ({"flip": "never"}, "flip is 'never', not False, True or 'alternating'")])
def test_a_wrong_field_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**fields)


@pytest.mark.parametrize(("shards", "repeats"), [(1, 1), (2, 1), (2, 2)])
def test_an_alternating_flip_mirrors_an_image_in_every_other_epoch(shards, repeats, tmp_path):
    """32 images, six epochs of a step each. Copies in an epoch are mirrored alike. An epoch without the image counts.
    """
    pictures = noise(32, 8, 8)
    images, samples = fed(written(tmp_path, pictures), Augmentation(flip="alternating"), 8, shards, 6, repeats=repeats)
    begins = np.random.Generator(np.random.Philox(np.random.SeedSequence([7, 0, 8]))).random(32) < 0.5
    assert 8 < begins.sum() < 24
    for position, (image, sample) in enumerate(zip(images, samples, strict=True)):
        is_mirrored = begins[sample] ^ (position // 32 % 2 == 1)
        np.testing.assert_array_equal(image, pictures[sample][:, ::-1] if is_mirrored else pictures[sample])
    counts = np.bincount(samples[:32], minlength=32)
    assert sorted({*counts.tolist()}) == ([1] if repeats == 1 else [0, 2])


def test_an_alternating_flip_changes_nothing_else():
    recipe, positions = dataclasses.replace(AUGMENTATIONS["nnabla"], flip="alternating"), np.arange(200)
    mirrored = augmentation.mirrored_in_turn(100, 3, positions % 100, positions // 100)
    before, after = columns("nnabla", 224, 3, positions), columns(recipe, 224, 3, positions, mirrored)
    assert [name for name in before if (before[name] != after[name]).any()] == ["warp"]
    alone = columns(AUGMENTATIONS["reflect_crop_alternate_flip"], 224, 3, positions, mirrored)
    np.testing.assert_array_equal(alone["mirror"][:, 0], mirrored)
    assert (mirrored[:100] != mirrored[100:]).all() and 30 < mirrored[:100].sum() < 70
    assert (augmentation.mirrored_in_turn(100, 4, positions % 100, positions // 100) != mirrored).any()
    np.testing.assert_array_equal(augmentation.mirrored_in_turn(1000, 3, positions % 100, positions // 100), mirrored)


def dali_parts(recipe, sizes, rows):
    """(corner, size) as the graph computes them."""
    from nvidia.dali import Pipeline, fn

    graph = Pipeline(batch_size=len(sizes), num_threads=1, device_id=None)
    with graph:
        sides, numbers = (fn.external_source(source=itertools.repeat(list(values)), batch=True)
                        for values in (sizes, rows))
        named = augmentation.by_name(recipe, numbers) if recipe.random else None
        graph.set_outputs(*pipeline.crop(sides, named, recipe))
    graph.build()
    return [np.array(output.as_array()) for output in graph.run()]


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_part_that_is_decoded_against_numpy(name):
    recipe = AUGMENTATIONS[name]
    sizes = np.repeat(SIZES, 200, axis=0)
    rows, numbers = np.zeros((len(sizes), 1), np.float32), {}
    if recipe.random:
        rows = random_numbers(recipe, 224, 5, np.arange(len(sizes)))
        numbers = {name: values.astype(np.float64)
                   for name, values in columns(recipe, 224, 5, np.arange(len(sizes))).items()}
    shorter = sizes.min(axis=1, keepdims=True).astype(np.float64)
    if recipe.enlarge is None:  # of a square of one pixel, stretched to the image
        largest = np.minimum(recipe.area[1], (1 / numbers["sides"]).min(axis=1) ** 2)
        area = np.minimum(largest, recipe.area[0] + (largest - recipe.area[0]) * numbers["area"][:, 0])
        exact = np.sqrt(area)[:, None] * numbers["sides"] * sizes
    elif recipe.area:
        pixels = sizes.astype(np.float64).prod(axis=1)
        largest = np.minimum(recipe.area[1], (sizes / numbers["sides"]).min(axis=1) ** 2 / pixels)
        area = np.minimum(largest, recipe.area[0] + (largest - recipe.area[0]) * numbers["area"][:, 0])
        exact = np.sqrt(area * pixels)[:, None] * numbers["sides"]
    elif recipe.rescale:
        exact = np.repeat(shorter / (recipe.rescale[0] + np.ptp(recipe.rescale) * numbers["area"]), 2, axis=1)
    else:
        exact = np.repeat(shorter / recipe.enlarge, 2, axis=1)  # of nnabla's only in validation
    corner, size = dali_parts(recipe, sizes, rows)
    assert (np.abs(size - np.clip(exact, 1, sizes)) <= 0.51).all()
    offset = numbers["offset"] if recipe.area or recipe.shift else 0.5
    assert (np.abs(corner - (sizes - size) * offset) <= 0.51).all()
    assert (corner >= 0).all() and (corner + size <= sizes).all() and (size >= 1).all()
    if recipe.area == (0.08, 1.0):
        photos = sizes[:, 0] * sizes[:, 1] > 100_000
        photos &= sizes.max(axis=1) < 2 * sizes.min(axis=1)
        share = (size.prod(axis=1) / sizes.prod(axis=1))[photos]
        assert 0.07 < share.min() < 0.2 and share.max() > 0.9


def test_resnets_crop_is_224_of_256_to_480():
    rows = random_numbers(AUGMENTATIONS["resnet"], 224, 0, np.arange(4000))
    _, size = dali_parts(AUGMENTATIONS["resnet"], np.repeat(SIZES[:1], 4000, axis=0), rows)
    sides = 224 * 375 / size[:, 0]  # what the shorter side was made, where 224 pixels were taken
    assert 255 < sides.min() < 258 and 476 < sides.max() < 482 and abs(np.median(sides) - 368) < 6


def test_colours_lie_along_the_principal_components():
    colours = columns("resnet", 224, 0, np.arange(50_000))["colour"]
    colours = colours.astype(np.float64)
    axes, scales = augmentation.COLOUR_AXES, 255 * 0.1 * augmentation.COLOUR_SCALES
    np.testing.assert_allclose(axes.T @ axes, np.eye(3), atol=1e-3)  # as all principal axes, to the digits published
    np.testing.assert_allclose(np.cov(colours.T), axes @ np.diag(scales ** 2) @ axes.T, rtol=0.03, atol=0.01)
    along = colours @ np.linalg.inv(axes).T / scales
    assert abs(along.mean(axis=0)).max() < 0.02 and abs((along ** 4).mean(axis=0) - 3).max() < 0.15  # normal


def test_a_colour_is_added_to_every_pixel(digits):
    """Against the same pictures without: a float addition, rounded and clipped to 0 to 255."""
    from data.dataset import open_dataset
    from data.feed import Feed

    plain = dataclasses.replace(AUGMENTATIONS["resnet"], colour=False)
    pictures = []
    for recipe in (plain, AUGMENTATIONS["resnet"]):
        with Feed(open_dataset(digits), 24, recipe, 3).train(0, 1, 64, 64) as batches:
            pictures.append(next(batches)[0].numpy().astype(np.float64))
    colour = columns("resnet", 24, 3, np.arange(64))["colour"][:, None, None]
    expected = np.clip(pictures[0] + colour, 0, 255)
    assert np.abs(pictures[1] - expected).max() <= 0.51 and np.abs(colour).max() > 5


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Augmentation)
                                   if field.name not in (*augmentation.FIXED, "operations")])
def test_each_field_alone_changes_the_images(digits, field):
    from data.dataset import open_dataset
    from data.feed import Feed

    value, images = {"area": (0.08, 0.5), "rescale": (1.2, 2.0), "padding": 3}.get(field, True), []
    for recipe in (Augmentation(enlarge=1.2), Augmentation(enlarge=1.2, **{field: value})):
        with Feed(open_dataset(digits), 24, recipe, 3).train(0, 1, 16, 16) as batches:
            images.append(next(batches)[0].numpy())
    assert (images[0] != images[1]).any(axis=(1, 2, 3)).sum() > 4


@pytest.mark.parametrize(("name", "corner", "size"), [
    ("alexnet", [21, 84], [333, 333]), ("crop", [0, 63], [375, 375]), ("crop_flip_mild", [0, 0], [375, 500])])
def test_validation_takes_the_centre_or_all(name, corner, size):
    """227 of 256: the square of side 375 / (256 / 227) = 332.5 in the middle of 375 x 500."""
    from nvidia.dali import Pipeline, fn

    graph = Pipeline(batch_size=1, num_threads=1, device_id=None)
    with graph:
        sides = fn.external_source(source=itertools.repeat([SIZES[0]]), batch=True)
        graph.set_outputs(*pipeline.crop(sides, None, AUGMENTATIONS[name]))
    graph.build()
    assert [np.array(output.as_array()).tolist() for output in graph.run()] == [[corner], [size]]


def operators(pipe):
    """(operator, device) of everything that the outputs of a pipeline depend on."""
    found, waiting = {}, list(pipe._graph_out)
    while waiting:
        source = waiting.pop().source
        if source is not None and id(source) not in found:
            found[id(source)] = (type(source._op).__name__, source._op.device)
            waiting += [edge for group in source.inputs for edge in (group if isinstance(group, list) else [group])]
    return set(found.values())


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_graph_for_a_gpu(name):
    """Where CUDA is missing a graph can be put together, its operators and arguments checked, but not built."""
    from nvidia.dali import fn

    recipe = AUGMENTATIONS[name]
    readers = pipeline.Readers(lambda: (fn.external_source(name="encoded"), fn.external_source(name="label")),
                               (lambda: fn.external_source(name="numbers")) if recipe.random else None)
    transform = pipeline.Transform(32, recipe, DecoderSettings("gpu", 0, 2, 0.9), MEAN)
    pipe = pipeline.build_pipeline(readers, transform, 4, first_label=1)
    assert [edge.device for edge in pipe._graph_out] == ["gpu", "gpu"]
    found = operators(pipe)
    on_gpu = {"WarpAffine"} if recipe.warp else {"Resize"} | ({"Flip"} if recipe.flip else set())
    if recipe.padding:
        on_gpu |= {"WarpPerspective" if recipe.filling == "reflect" else "Slice"}
    assert {(operator, "gpu") for operator in on_gpu} <= found
    assert not {(operator, "cpu") for operator in on_gpu} & found
    assert any(device == "mixed" and "Slice" in operator for operator, device in found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_gpu_makes_nearly_the_same_pictures(digits, name):
    from data.dataset import open_dataset
    from data.feed import Feed

    def images(device):
        with Feed(open_dataset(digits), 24, AUGMENTATIONS[name], 3, device=device).train(0, 1, 64, 64) as batches:
            return next(batches)[0].numpy().astype(float)

    assert np.abs(images(DecoderSettings("gpu", 0, 2)) - images(DecoderSettings())).mean() < 3


def test_a_worker_generates_the_numbers_of_its_own_samples_alone():
    """The bits are those of one long draw; the memory is that of the worker's part."""
    bits = np.random.Philox(key=np.random.SeedSequence([7, 0, 3]).generate_state(2, np.uint64)).advance(11 * 4)
    everything = np.random.Generator(bits).random((960, 16))
    positions = np.concatenate([np.arange(start, start + 6) for start in (900, 12, 18, 480)])
    np.testing.assert_array_equal(uniforms(7, Purpose.AUGMENTATION, 11 + positions, 16), everything[positions])
    tracemalloc.start()
    uniforms(7, Purpose.AUGMENTATION, 1024 * np.arange(1000), 16)
    assert tracemalloc.get_traced_memory()[1] < 1e6  # all numbers would be 131 MB
    tracemalloc.stop()


OWN = """
from data.augmentation import Augmentation
SMALL = Augmentation(area=(0.2, 0.4), enlarge=2.0)
class Settings:
    EQUALIZED = Augmentation(operations=RandAugment.parse("m6-n2-mstd0.5-inc1"))
NUMBER = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_augmentations.py").write_text(f"from data.rand_augment import RandAugment\n{OWN}")
    (tmp_path / "own_mistake.py").write_text(f"{OWN.partition('class')[0]}WRONG = Augmentation(area=(8, 100))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])


def test_an_augmentation_of_ones_own(own_module, digits, digit_records):
    """Validation takes half of the height and width, against Pillow; training crops at random."""
    from data.dataset import open_dataset
    from data.feed import Feed

    feed = Feed(open_dataset(digits), 24, AUGMENTATIONS["own_augmentations:SMALL"], 3)
    assert feed.prepare([(0, 2)], 64, 64).numbers.shape == (128, 5)
    with feed.validation(4) as (batches, _):
        images = next(batches)[0].numpy().astype(float)
    for image, (jpeg, _) in zip(images, digit_records["validation"], strict=False):
        whole = Image.open(io.BytesIO(jpeg)).convert("RGB")
        side = whole.width // 4
        half = whole.crop((side, side, 3 * side, 3 * side)).resize((24, 24), Image.Resampling.BILINEAR)
        assert np.abs(image - np.asarray(half, float)).max() <= 2


def test_operations_of_an_own_augmentation_are_applied(own_module, digits):
    from data.dataset import open_dataset
    from distributed.world import World
    from plan.flags import parse
    from training.build import make_feed

    settings = parse(["train.py", "--augmentation=own_augmentations:Settings.EQUALIZED"])
    feed = make_feed(settings.recipe, settings.launch, open_dataset(digits), World())
    assert feed.prepare([(0, 1)], 8, 8).numbers.shape[1] == 4  # an index and a parameter of each of two operations


def test_an_operation_of_ones_own_is_one_class(digits, tmp_path, monkeypatch):
    """The Cutout of the documentation, against NumPy, on one worker and on two, and with RandAugment after it."""
    from data.dataset import open_dataset

    [code] = re.findall(r"```python\n(?:(?!```).)*class Cutout.*?```", (ROOT / "docs/keras.md").read_text(), re.DOTALL)
    (tmp_path / "own_cutout.py").write_text(code.strip("`").removeprefix("python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    recipe = AUGMENTATIONS["own_cutout:CUTOUT"]
    plain = dataclasses.replace(recipe, operations=())
    expected, _ = fed(open_dataset(digits), plain, 16)
    centres = np.random.Generator(np.random.Philox(np.random.SeedSequence(
        [7, 0, 2**32 + zlib.crc32(b"cutout")]))).random((64, 4))[:, :2]
    for image, centre in zip(expected, centres, strict=True):
        top, left = np.floor(16 * (centre - 0.25)).astype(int)
        image[max(0, top):top + 8, max(0, left):left + 8] = 128
    for shards in (1, 2):
        np.testing.assert_array_equal(fed(open_dataset(digits), recipe, 16, shards)[0], expected)
    both = recipe.followed_by(RandAugment(6)).followed_by(RandAugment(9))
    assert [type(one).__name__ for one in both.operations] == ["Cutout", "RandAugment"]
    assert both.operations[1].magnitude == 9
    changed, _ = fed(open_dataset(digits), both, 16)
    assert 8 < (changed == expected).all(axis=(1, 2, 3)).sum() < 40  # a quarter has no other operation


@pytest.mark.parametrize(("name", "message"), [
    ("own_augmentations:NUMBER", "it is int, not a data.augmentation.Augmentation"),
    ("own_augmentations:ABSENT", "AttributeError: module 'own_augmentations' has no attribute 'ABSENT'"),
    ("no_such_module:SMALL", "ModuleNotFoundError: No module named 'no_such_module'"),
    ("own_mistake:WRONG", r"ValueError: area is \(8, 100\), not the least and the most of a positive number up to 1 ")])
def test_a_wrong_augmentation_of_ones_own(own_module, name, message):
    with pytest.raises(UserError, match=f"^--augmentation={name}: {message}"):
        AUGMENTATIONS[name]
