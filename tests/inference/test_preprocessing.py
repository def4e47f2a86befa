"""The pixels of a SavedModel against DALI's in evaluation: JPEGs and PNGs of all kinds and sizes, EXIF orientation."""
import functools
import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from data import pipeline
from data.augmentation import AUGMENTATIONS
from inference.preprocessing import orientation, preprocess

ORIENTATION = 0x0112


@functools.cache
def photo(width: int, height: int) -> Image.Image:
    """A picture with detail at all scales, as in photos."""
    random, pixels = np.random.default_rng(width + height), np.zeros((height, width, 3))
    for detail, strength in ((4, 0.4), (12, 0.2), (40, 0.2), (120, 0.2)):
        noise = Image.fromarray(random.integers(0, 256, (detail, detail, 3), dtype=np.uint8))
        pixels += strength * np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), float)
    return Image.fromarray(np.clip(1.4 * pixels - 50, 0, 255).astype(np.uint8))


def encoded(image, kind="JPEG", **options) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def turned(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = number
    return exif


def by_dali(image: bytes, size: int, recipe: str) -> np.ndarray:
    from nvidia.dali import Pipeline, fn

    graph = Pipeline(batch_size=1, num_threads=1, device_id=None)
    with graph:
        images = fn.external_source(source=lambda: [np.frombuffer(image, np.uint8)], batch=True)
        graph.set_outputs(pipeline.augmented(images, None, pipeline.Transform(size, AUGMENTATIONS[recipe])))
    graph.build()
    return np.array(graph.run()[0][0])


def by_tensorflow(image: bytes, size: int, recipe: str) -> np.ndarray:
    return _function(size, recipe)(image).numpy()


@functools.cache
def _function(size, recipe):
    function = functools.partial(preprocess, image_size=size, enlarge=AUGMENTATIONS[recipe].enlarge)
    return tf.function(function, input_signature=[tf.TensorSpec([], tf.string)], autograph=False)


@pytest.fixture(autouse=True, scope="module")
def released():
    """Compiled functions have to go before Python ends."""
    yield
    _function.cache_clear()


def check(image: bytes, size: int = 224, recipe: str = "crop_flip") -> None:
    theirs = by_dali(image, size, recipe)
    assert np.ptp(theirs) > 50
    np.testing.assert_array_equal(by_tensorflow(image, size, recipe), theirs)


PHOTO = photo(500, 375)
BIG_ENDIAN = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
KINDS = {
    "4:2:0": encoded(PHOTO, quality=90), "4:2:2": encoded(PHOTO, subsampling=1), "4:4:4": encoded(PHOTO, subsampling=0),
    "quality 30": encoded(PHOTO, quality=30), "progressive": encoded(PHOTO, progressive=True),
    "grey": encoded(PHOTO.convert("L")), "rgb": encoded(PHOTO, keep_rgb=True), "cmyk": encoded(PHOTO.convert("CMYK")),
    "png": encoded(PHOTO, "PNG"), "grey png": encoded(PHOTO.convert("L"), "PNG"),
    "palette png": encoded(PHOTO.quantize(256), "PNG"), "alpha png": encoded(PHOTO.convert("RGBA"), "PNG"),
    "big-endian exif": encoded(PHOTO, exif=BIG_ENDIAN),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind):
    check(KINDS[kind])


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (300, 100), (64, 200)])
def test_whole_images_are_stretched(width, height):
    check(encoded(photo(width, height)), 64, "crop_flip_mild")


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_pngs_of_16_bits(channels):
    """Noise in all bits, so that half of the values would differ if the lower ones were cut off."""
    values = np.random.default_rng(channels).integers(0, 65536, (40, 40, channels)).astype(np.uint16)
    image = tf.io.encode_png(values).numpy()
    np.testing.assert_array_equal(by_tensorflow(image, 40, "none"), by_dali(image, 40, "none"))


FRAMES = [photo(64, 48), photo(64, 48).transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
GIFS = {
    "one frame": encoded(FRAMES[0], "GIF"),
    "animated": encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
    "palettes of its own": encoded(FRAMES[0].quantize(200), "GIF", save_all=True,
                                   append_images=[FRAMES[1].quantize(8)], interlace=1),
    "grey": encoded(FRAMES[0].convert("L"), "GIF", save_all=True, append_images=[FRAMES[1].convert("L")]),
}


@pytest.mark.parametrize("kind", GIFS)
def test_of_a_gif_the_first_frame(kind):
    shown = Image.open(io.BytesIO(GIFS[kind]))
    assert getattr(shown, "n_frames", 1) == 1 + (kind != "one frame")
    expected = by_dali(encoded(shown.convert("RGB"), "PNG"), 48, "none")
    np.testing.assert_array_equal(by_tensorflow(GIFS[kind], 48, "none"), expected)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("number", range(1, 9))
def test_orientation(kind, number):
    """The middle of an image with an odd margin, so that turning after the crop would be off by a pixel."""
    image = encoded(photo(500, 375), kind, exif=turned(number))
    assert orientation(tf.constant(image)) == number
    check(image)


@pytest.mark.parametrize("size", [(353, 220), (516, 471), (1024, 768), (333, 500), (260, 256), (100, 77), (3, 400),
                                  (224, 224), (640, 640)])
@pytest.mark.parametrize("recipe", ["none", "crop_flip", "alexnet"])
def test_sizes(size, recipe):
    check(encoded(photo(*size)), recipe=recipe)


def test_photos_of_any_size():
    random = np.random.default_rng(0)
    for _ in range(20):
        check(encoded(photo(*map(int, random.integers(200, 700, 2)))))


@pytest.mark.parametrize("image", [b"", b"x", b"GIF89a", GIFS["animated"][:400], b"\xff\xd8\xff",
                                   KINDS["4:2:0"][:100], KINDS["4:2:0"][:-60], b"\x89PNG",
                                   KINDS["png"][:60], BIG_ENDIAN])
def test_damaged(image):
    """The search for the orientation ends, and the decoder reports what is wrong."""
    assert orientation(tf.constant(image)) == 1
    with pytest.raises(tf.errors.InvalidArgumentError):
        by_tensorflow(image, 32, "none")


def test_damaged_exif():
    image = bytearray(KINDS["big-endian exif"])
    start = image.index(b"Exif\0\0") + 6
    for offset, values in ((4, b"\x7f\xff\xff\xff"), (8, b"\xff\xff"), (18, b"\0\x63")):
        damaged = image.copy()
        damaged[start + offset:start + offset + len(values)] = values
        assert orientation(tf.constant(bytes(damaged))) in (1, 6)
