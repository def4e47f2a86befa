"""A sample's random numbers and what DALI makes of it, against NumPy; the graph for a GPU as far as none is needed."""
import dataclasses
import itertools
import tracemalloc

import numpy as np
import pytest

from data import augmentation, pipeline
from data.augmentation import AUGMENTATIONS, COLUMNS, Augmentation, random_numbers
from data.pipeline import DecoderSettings
from data.randomness import uniforms

SIZES = np.array([[375, 500], [500, 375], [32, 32], [100, 1000], [1000, 90], [1, 1], [3, 400], [227, 256]], np.float32)


def columns(rows):
    starts = np.cumsum([0, *COLUMNS.values()])
    return {name: rows[:, start:start + width] for (name, width), start in zip(COLUMNS.items(), starts, strict=False)}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_numbers_follow_from_the_position(name):
    rows = random_numbers(AUGMENTATIONS[name], 224, seed=3, start=0, positions=np.arange(200))
    assert rows.dtype == np.float32 and rows.shape == (200, sum(COLUMNS.values()))
    for position in (1, 7, 100, 199):
        [row] = random_numbers(AUGMENTATIONS[name], 224, 3, position, np.arange(1))
        np.testing.assert_array_equal(row, rows[position])
    some = np.array([150, 3, 77])
    np.testing.assert_array_equal(random_numbers(AUGMENTATIONS[name], 224, 3, 0, some), rows[some])
    assert (random_numbers(AUGMENTATIONS[name], 224, 4, 0, np.arange(200)) != rows).any(axis=1).all()
    assert len(np.unique(rows, axis=0)) == 200


def test_numbers_lie_where_they_should():
    numbers = columns(random_numbers(AUGMENTATIONS["full"], 224, 0, 0, np.arange(20_000)))
    for name, low, high in (("area", 0, 1), ("offset", 0, 1), ("noise_offset", 0, 1), ("brightness", 0.8, 1.2),
                            ("contrast", 0.8, 1.2), ("noise", 0, 8)):
        values = numbers[name]
        assert values.min() >= low and values.max() <= high
        np.testing.assert_allclose(values.mean(axis=0), (low + high) / 2, atol=(high - low) * 0.01)
        np.testing.assert_allclose(values.var(axis=0), (high - low) ** 2 / 12, rtol=0.05)
    assert set(np.unique(numbers["mirror"])) == {0, 1} and abs(numbers["mirror"].mean() - 0.5) < 0.02
    aspect = np.log(numbers["sides"][:, 1] / numbers["sides"][:, 0])
    np.testing.assert_allclose([aspect.min(), aspect.max()], np.log([3 / 4, 4 / 3]), atol=0.01)
    np.testing.assert_allclose(numbers["sides"].prod(axis=1), 1, rtol=1e-5)
    assert abs(np.corrcoef(np.concatenate([numbers["area"], numbers["offset"], aspect[:, None]], axis=1).T)
               - np.eye(4)).max() < 0.03


def test_the_warp_turns_slants_and_shrinks_about_the_centre():
    """Undone by the transformation itself, put together step by step for each of four points."""
    matrices = augmentation._warp(*(np.array([value]) for value in (0.2,)), [np.array([0.05]), np.array([-0.1])],
                                  [np.array([0.9]), np.array([1.1])], 112.0)
    for x, y in ((112, 112), (0, 0), (200, 30), (17, 190)):
        turned = [np.cos(0.2) * (x - 112) - np.sin(0.2) * (y - 112), np.sin(0.2) * (x - 112) + np.cos(0.2) * (y - 112)]
        slanted = [turned[0] + 0.05 * turned[1], turned[1] - 0.1 * turned[0]]
        there = [0.9 * slanted[0] + 112, 1.1 * slanted[1] + 112]
        np.testing.assert_allclose(matrices[0] @ [*there, 1], [x, y], rtol=1e-9, atol=1e-9)


def dali_parts(recipe, sizes, rows):
    """(corner, size) as the graph computes them."""
    from nvidia.dali import Pipeline, fn

    graph = Pipeline(batch_size=len(sizes), num_threads=1, device_id=None)
    with graph:
        sides, numbers = (fn.external_source(source=itertools.repeat(list(values)), batch=True)
                        for values in (sizes, rows))
        graph.set_outputs(*pipeline.crop_window(sides, pipeline.by_name(numbers) if recipe.random else None, recipe))
    graph.build()
    return [np.array(output.as_array()) for output in graph.run()]


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_part_that_is_decoded_against_numpy(name):
    recipe = AUGMENTATIONS[name]
    sizes = np.repeat(SIZES, 50, axis=0)
    rows = random_numbers(recipe, 224, 5, 0, np.arange(len(sizes)))
    numbers, shorter = columns(rows.astype(np.float64)), sizes.min(axis=1, keepdims=True).astype(np.float64)
    if recipe.area:
        pixels = sizes.astype(np.float64).prod(axis=1)
        largest = np.minimum(recipe.area[1], (sizes / numbers["sides"]).min(axis=1) ** 2 / pixels)
        area = np.minimum(largest, recipe.area[0] + (largest - recipe.area[0]) * numbers["area"][:, 0])
        exact = np.sqrt(area * pixels)[:, None] * numbers["sides"]
    elif recipe.rescale:
        exact = np.repeat(shorter / (recipe.rescale[0] + np.ptp(recipe.rescale) * numbers["area"]), 2, axis=1)
    else:
        exact = np.repeat(shorter / recipe.enlarge, 2, axis=1)
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
    rows = random_numbers(AUGMENTATIONS["resnet"], 224, 0, 0, np.arange(4000))
    _, size = dali_parts(AUGMENTATIONS["resnet"], np.repeat(SIZES[:1], 4000, axis=0), rows)
    sides = 224 * 375 / size[:, 0]  # what the shorter side was made, where 224 pixels were taken
    assert 255 < sides.min() < 258 and 476 < sides.max() < 482 and abs(np.median(sides) - 368) < 6


def test_colours_lie_along_the_principal_components():
    colours = columns(random_numbers(AUGMENTATIONS["resnet"], 224, 0, 0, np.arange(50_000)))["colour"]
    colours = colours.astype(np.float64)
    axes, scales = augmentation.COLOUR_AXES, 255 * 0.1 * augmentation.COLOUR_SCALES
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
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(AUGMENTATIONS, "resnet", recipe)
            with Feed(open_dataset(digits), 24, "resnet", 3).train(0, 1, 64, 64) as batches:
                pictures.append(next(batches)[0].numpy().astype(np.float64))
    colour = columns(random_numbers(AUGMENTATIONS["resnet"], 24, 3, 0, np.arange(64)))["colour"][:, None, None]
    expected = np.clip(pictures[0] + colour, 0, 255)
    assert np.abs(pictures[1] - expected).max() <= 0.51 and np.abs(colour).max() > 5


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Augmentation)
                                   if field.name not in augmentation.FIXED])
def test_each_field_alone_changes_the_images(digits, field):
    from data.dataset import open_dataset
    from data.feed import Feed

    value, images = {"area": (0.08, 0.5), "rescale": (1.2, 2.0)}.get(field, True), []
    for recipe in (Augmentation(enlarge=1.2), Augmentation(enlarge=1.2, **{field: value})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(AUGMENTATIONS, "none", recipe)
            with Feed(open_dataset(digits), 24, "none", 3).train(0, 1, 16, 16) as batches:
                images.append(next(batches)[0].numpy())
    assert (images[0] != images[1]).any(axis=(1, 2, 3)).sum() > 4


def test_validation_takes_the_centre():
    """227 of 256: the square of side 375 / (256 / 227) = 332.5 in the middle of 375 x 500."""
    from nvidia.dali import Pipeline, fn

    graph = Pipeline(batch_size=1, num_threads=1, device_id=None)
    with graph:
        sides = fn.external_source(source=itertools.repeat([SIZES[0]]), batch=True)
        graph.set_outputs(*pipeline.crop_window(sides, None, AUGMENTATIONS["alexnet"]))
    graph.build()
    assert [np.array(output.as_array()).tolist() for output in graph.run()] == [[[21, 84]], [[333, 333]]]


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
    pipe = pipeline.build_pipeline(
        lambda: (fn.external_source(name="encoded"), fn.external_source(name="label")),
        (lambda: fn.external_source(name="numbers")) if recipe.random else None,
        batch_size=4, image_size=32, augmentation=recipe, first_label=1, device=DecoderSettings("gpu", 0, 2, 0.9))
    assert [edge.device for edge in pipe._graph_out] == ["gpu", "gpu"]
    found = operators(pipe)
    on_gpu = {"Resize"} | ({"Flip"} if recipe.flip else set()) | (
        {"WarpAffine", "BrightnessContrast"} if recipe.warp else set())
    assert {(operator, "gpu") for operator in on_gpu} <= found
    assert not {(operator, "cpu") for operator in on_gpu} & found
    assert any(device == "mixed" and "Slice" in operator for operator, device in found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_gpu_makes_nearly_the_same_pictures(digits, name):
    from data.dataset import open_dataset
    from data.feed import Feed

    def images(device):
        with Feed(open_dataset(digits), 24, name, 3, device=device).train(0, 1, 64, 64) as batches:
            return next(batches)[0].numpy().astype(float)

    assert np.abs(images(DecoderSettings("gpu", 0, 2)) - images(DecoderSettings())).mean() < 3


def test_a_worker_generates_the_numbers_of_its_own_samples_alone():
    """The bits are those of one long draw; the memory is that of the worker's part."""
    bits = np.random.Philox(key=np.random.SeedSequence([7, 1]).generate_state(2, np.uint64)).advance(11 * 4)
    everything = np.random.Generator(bits).random((960, 16))
    positions = np.concatenate([np.arange(start, start + 6) for start in (900, 12, 18, 480)])
    np.testing.assert_array_equal(uniforms(7, 1, 11, positions, 16), everything[positions])
    tracemalloc.start()
    uniforms(7, 1, 0, 1024 * np.arange(1000), 16)
    assert tracemalloc.get_traced_memory()[1] < 1e6  # all numbers would be 131 MB
    tracemalloc.stop()
