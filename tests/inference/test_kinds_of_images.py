"""One file, four ways to its pixels: in place by DALI, as data.prepare stores it, --mode=predict and the SavedModel.

They are the same, or the file is refused. All files show the same picture, some in grey, in bits or with a palette.
"""
import functools
import struct
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageChops

from data import images, pipeline
from data.augmentation import AUGMENTATIONS
from data.images import Rejected, Rules, check, store
from inference import predict
from inference.preprocessing import preprocess
from tests.rigs.pictures import encode, picture

WIDTH, HEIGHT = 64, 48  # a central square of 48 pixels, which is not resized
PHOTO = picture(1, (WIDTH, HEIGHT))
PIXELS = np.asarray(PHOTO)
GREY = PHOTO.convert("L")
SIDEWAYS = PHOTO.transpose(Image.Transpose.ROTATE_90)  # what a camera stores with TURNED
TURNED = Image.Exif()
TURNED[0x0112] = 6
ALPHA = Image.fromarray(np.linspace(90, 255, WIDTH * HEIGHT).astype(np.uint8).reshape(HEIGHT, WIDTH))
PALETTE = PHOTO.quantize(250)
CLEAR = PALETTE.getpixel((30, 20))
BITS = PHOTO.convert("1")
INK = PHOTO.convert("CMYK")
OTHER = PHOTO.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
DEEP = Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257)


def exif(*orientations) -> bytes:
    """EXIF data whose directory gives the orientation several times."""
    entries = b"".join(struct.pack("<HHIHH", 0x0112, 3, 1, value, 0) for value in orientations)
    return b"II*\0" + struct.pack("<IH", 8, len(orientations)) + entries + struct.pack("<I", 0)


def with_segments(image, *orientations) -> bytes:
    """A JPEG with a segment of EXIF data for each orientation."""
    content, segments = encode(image, quality=95), [b"Exif\0\0" + exif(value) for value in orientations]
    return content[:2] + b"".join(
        b"\xff\xe1" + struct.pack(">H", len(one) + 2) + one for one in segments) + content[2:]


def with_chunks(image, *orientations) -> bytes:
    """A PNG with a chunk of EXIF data for each orientation."""
    content, chunks = encode(image, "PNG"), [b"eXIf" + exif(value) for value in orientations]
    return content[:33] + b"".join(struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one))
                                   for one in chunks) + content[33:]


def with_alpha(image) -> Image.Image:
    image = image.copy()
    image.putalpha(ALPHA)
    return image


def unmarked(image, **options) -> bytes:
    """A CMYK JPEG without Adobe's marker: 255 is full ink, where Adobe writes 0."""
    content = encode(ImageChops.invert(image), **options)
    start = content.index(b"\xff\xee")
    return content[:start] + content[start + 2 + int.from_bytes(content[start + 2:start + 4], "big"):]


def ycck() -> bytes:
    """Marked as YCCK: YCC of the inverted colours, and no black."""
    colours = np.asarray(ImageChops.invert(PHOTO).convert("YCbCr"))
    inverted = np.dstack([255 - colours, np.zeros((HEIGHT, WIDTH), np.uint8)])  # Pillow inverts what it writes
    content = bytearray(encode(Image.frombytes("CMYK", PHOTO.size, inverted.tobytes()), quality=95, subsampling=0))
    content[content.index(b"Adobe") + 11] = 2
    return bytes(content)


def deep_png(channels) -> bytes:
    pixels = np.asarray({1: GREY, 2: with_alpha(GREY), 3: PHOTO, 4: with_alpha(PHOTO)}[channels])
    return tf.io.encode_png(pixels.reshape(HEIGHT, WIDTH, channels).astype(np.uint16) * 257).numpy()


def ppm(largest: int) -> bytes:
    kind = np.uint8 if largest < 256 else ">u2"
    return b"P6\n%d %d\n%d\n" % (WIDTH, HEIGHT, largest) + (PIXELS.astype(int) * largest // 255).astype(kind).tobytes()


def multiplied() -> bytes:
    """A TIFF whose colours have been multiplied by alpha, as its tag 338 says."""
    colours = np.rint(PIXELS * (np.asarray(ALPHA)[..., None] / 255)).astype(np.uint8)
    tag = struct.pack("<HHI", 338, 3, 1)
    return encode(with_alpha(Image.fromarray(colours)), "TIFF").replace(tag + b"\2", tag + b"\1")


def bmp_565() -> bytes:
    red, green, blue = np.moveaxis(PIXELS.astype("<u2"), -1, 0)
    rows = (red >> 3 << 11 | green >> 2 << 5 | blue >> 3)[::-1].tobytes()
    header = struct.pack("<IiiHHIIiiII", 40, WIDTH, HEIGHT, 1, 16, 3, len(rows), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 66 + len(rows), 0, 0, 66) + header + struct.pack(
        "<III", 0xf800, 0x07e0, 0x001f) + rows


def small_frame() -> bytes:
    """A GIF whose only frame has 5 more columns to its left."""
    content = bytearray(encode(PALETTE, "GIF"))
    start = content.index(b",\0\0\0\0")
    content[6:8], content[start + 1:start + 3] = struct.pack("<H", WIDTH + 10), struct.pack("<H", 5)
    return bytes(content)


ANIMATED = {"save_all": True, "append_images": [OTHER, OTHER]}
EVERYWHERE = {
    "jpeg": encode(PHOTO, quality=95), "jpeg 4:4:4": encode(PHOTO, subsampling=0), "jpeg grey": encode(GREY),
    "jpeg progressive": encode(PHOTO, progressive=True, quality=95), "jpeg rgb": encode(PHOTO, keep_rgb=True),
    "jpeg turned": encode(SIDEWAYS, exif=TURNED, quality=95), "jpeg mpo": encode(PHOTO, "MPO", quality=95),
    "jpeg cmyk": encode(INK, quality=95), "jpeg cmyk progressive": encode(INK, quality=95, progressive=True),
    "jpeg cmyk unmarked": unmarked(INK, quality=95), "jpeg ycck": ycck(),
    "jpeg cmyk turned": encode(SIDEWAYS.convert("CMYK"), exif=TURNED, quality=95),
    "jpeg turned twice": encode(SIDEWAYS, exif=b"Exif\0\0" + exif(6, 1), quality=95),
    "jpeg upright, then turned": encode(PHOTO, exif=b"Exif\0\0" + exif(1, 6), quality=95),
    "png": encode(PHOTO, "PNG"), "png grey": encode(GREY, "PNG"), "png alpha": encode(with_alpha(PHOTO), "PNG"),
    "png grey alpha": encode(with_alpha(GREY), "PNG"), "png palette": encode(PALETTE, "PNG"),
    "png palette transparency": encode(PALETTE, "PNG", transparency=bytes(range(250))),
    "png transparent colour": encode(PHOTO, "PNG", transparency=PHOTO.getpixel((30, 20))),
    "png grey transparent colour": encode(GREY, "PNG", transparency=GREY.getpixel((30, 20))),
    "png bits": encode(BITS, "PNG"), "png animated": encode(PHOTO, "PNG", **ANIMATED),
    "png turned": encode(SIDEWAYS, "PNG", exif=TURNED),
    "png alpha turned": encode(with_alpha(PHOTO).transpose(Image.Transpose.ROTATE_90), "PNG", exif=TURNED),
    **{f"png deep {'grey ' * (count < 3)}{count}": deep_png(count) for count in (1, 2, 3, 4)},
}
UNSAVED = {  # the SavedModel refuses them
    "bmp": encode(PHOTO, "BMP"), "bmp alpha": encode(with_alpha(PHOTO), "BMP"),
    "bmp palette": encode(PALETTE, "BMP"), "bmp grey": encode(GREY, "BMP"), "tiff": encode(PHOTO, "TIFF"),
    "tiff alpha": encode(with_alpha(PHOTO), "TIFF"), "tiff grey": encode(GREY, "TIFF"),
    "tiff palette": encode(PALETTE, "TIFF"), "tiff cmyk": encode(INK, "TIFF"),
    "tiff ycbcr": encode(PHOTO.convert("YCbCr"), "TIFF"), "tiff deep grey": encode(DEEP, "TIFF"),
    "tiff turned": encode(SIDEWAYS, "TIFF", exif=TURNED),
    **{f"tiff {name}": encode(PHOTO, "TIFF", compression=name) for name in ("tiff_lzw", "tiff_adobe_deflate", "jpeg")},
    "webp lossy": encode(PHOTO, "WEBP", quality=95), "webp": encode(PHOTO, "WEBP", lossless=True),
    "webp alpha": encode(with_alpha(PHOTO), "WEBP", lossless=True, exact=True),
    "webp lossy alpha": encode(with_alpha(PHOTO), "WEBP", quality=95, exact=True),
    "webp animated": encode(PHOTO, "WEBP", lossless=True, **ANIMATED),
    "ppm": ppm(255), "ppm deep": ppm(65535), "pgm grey": encode(GREY, "PPM"), "pbm bits": encode(BITS, "PPM"),
    "jp2": encode(PHOTO, "JPEG2000"), "jp2 alpha": encode(with_alpha(PHOTO), "JPEG2000"),
    "jp2 grey": encode(GREY, "JPEG2000"),
    "jp2 lossy": encode(PHOTO, "JPEG2000", irreversible=True, quality_mode="rates", quality_layers=[4]),
}
CONVERTED = {  # DALI refuses them in place
    "gif palette": encode(PALETTE, "GIF"), "gif palette animated": encode(PALETTE, "GIF", **ANIMATED),
    "gif grey interlaced": encode(GREY, "GIF", interlace=1),
    "gif palette transparent": encode(PALETTE, "GIF", transparency=CLEAR),
}
CONVERTED_UNSAVED = {  # so does the SavedModel
    "heic": encode(PHOTO, "HEIF", quality=95), "avif": encode(PHOTO, "AVIF", quality=95),
    "heic alpha": encode(with_alpha(PHOTO), "HEIF", quality=95), "gif palette small frame": small_frame(),
    "tiff bits": encode(BITS, "TIFF"), "jp2 grey alpha": encode(with_alpha(GREY), "JPEG2000"),
    "webp turned": encode(SIDEWAYS, "WEBP", lossless=True, exif=TURNED),
    # DALI makes something else of the others
    "ppm to 127": ppm(127), "ppm to 4095": ppm(4095), "bmp 565": bmp_565(),
    "tiff grey alpha": encode(with_alpha(GREY), "TIFF"), "tiff multiplied alpha": multiplied(),
}
MISREAD = {  # DALI alone makes something else of them
    "png behind another": encode(PHOTO, "PNG", default_image=True, **ANIMATED),
    "jpeg two exif": with_segments(PHOTO, 1, 6), "jpeg two exif turned": with_segments(SIDEWAYS, 6, 1),
    "png two exif": with_chunks(PHOTO, 6, 1), "png two exif turned": with_chunks(SIDEWAYS, 1, 6),
    "jpeg cmyk unmarked turned": unmarked(SIDEWAYS.convert("CMYK"), exif=TURNED, quality=95),
}
FILES = EVERYWHERE | UNSAVED | CONVERTED | CONVERTED_UNSAVED | MISREAD
BY_ONE = ("jpeg cmyk turned", "tiff palette", "tiff ycbcr")  # of these, DALI rounds otherwise
INEXACT = ("jpeg", "heic", "avif", "lossy", "ycbcr", " to ", "565", "multiplied")


def by_dali(contents: list[bytes]) -> list[np.ndarray]:
    from nvidia.dali import Pipeline, fn

    graph = Pipeline(batch_size=len(contents), num_threads=2, device_id=None)
    with graph:
        images = fn.external_source(source=lambda: [np.frombuffer(one, np.uint8) for one in contents], batch=True)
        graph.set_outputs(pipeline.augmented(images, None, pipeline.Transform(HEIGHT, AUGMENTATIONS["none"])))
    graph.build()
    return [np.array(image, int) for image in graph.run()[0]]


def shown(name) -> np.ndarray:
    """The central part of the picture."""
    kinds = {"grey": GREY, "bits": BITS, "palette": PALETTE, "": PHOTO}
    image = next(image for kind, image in kinds.items() if kind in name)
    pixels = np.asarray(image.convert("RGB"), int)
    if name == "gif palette transparent":
        pixels[np.asarray(PALETTE) == CLEAR] = 0
    if name == "gif palette small frame":  # 10 columns wider, and black there
        return np.pad(pixels, ((0, 0), (5, 5), (0, 0)))[:, 13:-13]
    return pixels[:, 8:-8]


@pytest.fixture(scope="module")
def pixels():
    """Functions from a name to pixels: the four ways."""
    compiled = tf.function(functools.partial(preprocess, image_size=HEIGHT, enlarge=1.0),
                           input_signature=[tf.TensorSpec([], tf.string)], autograph=False)
    in_place = EVERYWHERE | UNSAVED
    placed = dict(zip(in_place, by_dali(list(in_place.values())), strict=True))
    prepared = dict(zip(FILES, by_dali([store(content, Rules()).encoded for content in FILES.values()]), strict=True))
    return placed.__getitem__, prepared.__getitem__, compiled


@pytest.mark.parametrize("name", FILES)
def test_one_file_has_the_same_pixels_everywhere(pixels, name, tmp_path):
    placed, prepared, compiled = pixels
    (tmp_path / "file").write_bytes(FILES[name])
    predicted, problem = predict._read(tmp_path / "file", compiled)
    assert not problem
    predicted = predicted.astype(int)
    assert np.abs(predicted - shown(name)).mean() <= (4 if any(kind in name for kind in INEXACT) else 0)
    np.testing.assert_array_equal(prepared(name), predicted)
    if name in UNSAVED or name in CONVERTED_UNSAVED:
        with pytest.raises(tf.errors.InvalidArgumentError):
            compiled(FILES[name])
    else:
        np.testing.assert_array_equal(compiled(FILES[name]).numpy(), predicted)
    if name in EVERYWHERE or name in UNSAVED:
        check(FILES[name])
        assert np.abs(placed(name) - predicted).max() <= (name in BY_ONE)
    else:
        with pytest.raises(Rejected, match="DALI"):
            check(FILES[name])


def test_dali_decodes_what_is_called_intact(monkeypatch):
    """Also what data.prepare would store as it is, if it did not know better."""
    monkeypatch.setattr(images, "_copied", lambda *_: True)
    check(FILES["jpeg"])
    with pytest.raises(Rejected, match=r"^DALI does not decode it$"):
        check(FILES["jpeg two exif"])
