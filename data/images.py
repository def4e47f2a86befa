"""Prepares an image for storage: copies it if every decoder reads it alike, otherwise converts or resizes it."""
import atexit
import contextlib
import functools
import io
import warnings
from dataclasses import dataclass

from common.files import stand_in
from data.augmentation import Augmentation
from data.pipeline import decoder

# Formats found in image collections. Some of Pillow's other readers accept almost any file (TGA) or start a program
# (EPS).
READ = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF", "HEIF")
JPEGS = ("JPEG", "MPO")  # an MPO is a JPEG followed by more JPEGs
QUALITY = 95
ROUNDING = 1  # by which DALI's pixels may differ: of colours of 16 bits in TIFF, and of YCbCr and CMYK
# JPEG markers. Frames: baseline, extended, progressive. Segments: tables, application data, comment.
START_OF_SCAN, APP1 = 0xDA, 0xE1
HUFFMAN_FRAMES = {0xC0, 0xC1, 0xC2}
SEGMENTS = HUFFMAN_FRAMES | {0xC4, 0xDB, 0xDD, 0xFE} | set(range(0xE0, 0xF0))
EXIF, PNG_EXIF = b"Exif", b"eXIf"  # the start of a JPEG's segment, and the name of a PNG's chunk
PNG_END = b"IEND\xaeB`\x82"  # the name and the checksum of a PNG's last chunk
BITS = 258  # tags of a TIFF: number of bits of each channel
PHOTOMETRIC = 262  # which end of the grey values is white
CONVERT = "prepare the images with data.prepare, which converts it"
PHOTOS = ("HEIF", "AVIF")  # stored as JPEG. Others are stored without loss, because DALI or the SavedModel reads them


class Rejected(Exception):
    """The image cannot be used. The message says why and is the same on every machine."""


@dataclass(frozen=True)
class Rules:
    """How images are stored."""

    resize_shorter: int = 0  # a larger image is shrunk until its shorter side has this many pixels; 0: no resizing
    verify: bool = False  # whether every image is decoded, also those that are stored unchanged
    resize: tuple[int, int] | None = None  # width and height of all images, whatever their aspect; None: no resizing
    for_tensorflow: bool = False  # whether TensorFlow has to decode them, too, which reads no WebP

    def new_size(self, size: tuple[int, int]) -> tuple[int, int] | None:
        """Returns the width and height that an upright image of this size gets, or None if it keeps them."""
        if self.resize:
            return self.resize if size != self.resize else None
        shorter = self.resize_shorter
        if not 0 < shorter < min(size):
            return None
        long = max(shorter, round(max(size) * shorter / min(size)))
        return (shorter, long) if size[0] <= size[1] else (long, shorter)


@dataclass(frozen=True)
class Stored:
    """An image as it is stored."""

    encoded: bytes
    converted: bool = False  # whether its own bytes could not be stored
    resized: bool = False
    histogram: list[int] | None = None  # counts of the 256 values of red, then of green, then of blue, if requested


def store(encoded: bytes, rules: Rules, measure: bool = False) -> Stored:
    """Returns an image as it is to be stored.

    Raises Rejected if the bytes are not an image, or if it is damaged and has to be decoded (to convert, verify or
    measure).
    """
    from PIL import Image

    _add_heic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about large images and odd metadata, which are read anyway
        try:
            with Image.open(io.BytesIO(encoded), formats=READ) as image:
                return _store(image, encoded, rules, measure)
        except Image.UnidentifiedImageError:
            words = stand_in(encoded)
            raise Rejected(f"it is {words}" if words else "not an image of a known format") from None
        except Exception as error:  # Pillow raises errors of any type for a damaged header
            raise Rejected(" ".join(str(error).split()) or type(error).__name__) from None


def shorter_side(encoded: bytes) -> int:
    """Returns the shorter side of an image in pixels, from its header, or 0 if it cannot be read."""
    from PIL import Image

    _add_heic()
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # as in `store`
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(encoded), formats=READ) as image:
            return min(image.size)
    return 0


def check(encoded: bytes) -> None:
    """Decodes an image of a dataset with Pillow, and with DALI, as training does. Raises Rejected if one of them fails.

    Also raises it if data.prepare would convert the image and DALI's pixels are not those of the converted image.
    """
    import numpy as np

    stored = store(encoded, Rules(verify=True))
    pipeline = _decoder()
    try:
        pipeline.feed_input("encoded", [np.frombuffer(content, np.uint8) for content in {encoded, stored.encoded}])
        images = [np.array(image) for image in pipeline.run()[0]]
    except RuntimeError:
        _decoder.cache_clear()  # after an error, a pipeline is of no use
        raise Rejected("DALI does not decode it" + (f"; {CONVERT}" if stored.converted else "")) from None
    if stored.converted and (images[0].shape != images[-1].shape
                             or np.abs(images[0].astype(int) - images[-1]).max() > ROUNDING):
        raise Rejected(f"DALI makes other pixels of it than data.prepare and --mode=predict; {CONVERT}")


@functools.cache
def _decoder():
    return decoder(Augmentation(enlarge=None))


atexit.register(_decoder.cache_clear)  # a pipeline that outlives DALI's modules fails in its destructor


@functools.cache
def _add_heic() -> None:
    """Adds HEIC, the format of phones, to what Pillow reads."""
    import pi_heif

    pi_heif.register_heif_opener(decode_threads=1)  # each rank of data.prepare uses one core


def added(histogram: list[int], other: list[int] | None) -> list[int]:
    """Returns the sum of two histograms. Either may be empty."""
    if not histogram or not other:
        return histogram or other or []
    return [a + b for a, b in zip(histogram, other, strict=True)]


def _store(image, encoded, rules, measure) -> Stored:
    is_resized = rules.new_size(image.size) is not None
    copied = _copied(image, encoded, rules)
    if is_resized or not copied:
        kind = "JPEG" if is_resized or image.format in PHOTOS else "PNG"
        pixels = _pixels(image, rules)
        return Stored(_encoded(pixels, kind), not copied, is_resized, _histogram(pixels) if measure else None)
    if measure:
        return Stored(encoded, histogram=_histogram(_pixels(image, rules)))
    if rules.verify:
        _decode(image, encoded)
    return Stored(encoded)


def _copied(image, encoded, rules) -> bool:
    """Returns whether the bytes are stored unchanged: whether all decoders make the same image of them.

    DALI fails without the end of a PNG, decodes another image than the one in front of a PNG's animation, and reads no
    WebP with EXIF. If there are two sets of EXIF data, some decoders use the first and some the second.
    Grey of 16 bits becomes white in many programs.
    """
    if image.format in JPEGS:
        return image.mode in ("L", "RGB") and _has_sound_header(encoded)
    if image.format == "WEBP":
        return not rules.for_tensorflow and image.mode == "RGB" and image.n_frames == 1 and not image.info.get("exif")
    return (image.format == "PNG" and encoded[12:16] == b"IHDR" and PNG_END in encoded and encoded.count(PNG_EXIF) < 2
            and "default_image" not in image.info and not image.mode.startswith("I"))


def _has_sound_header(jpeg) -> bool:
    """Returns whether a JPEG is Huffman-coded, with at most one EXIF segment and nothing between the segments.

    Pillow skips garbage between segments, but DALI does not. Which other codings DALI decodes depends on its build.
    """
    offset = 2
    coded, exifs = False, 0
    while offset + 4 < len(jpeg) and jpeg[offset] == 0xFF:
        marker = jpeg[offset + 1]
        if marker == START_OF_SCAN:
            return coded and exifs < 2
        if marker not in SEGMENTS:
            break
        coded = coded or marker in HUFFMAN_FRAMES
        exifs += marker == APP1 and jpeg[offset + 4:offset + 8] == EXIF
        offset += 2 + int.from_bytes(jpeg[offset + 2:offset + 4], "big")
    return False


def _decode(image, encoded) -> None:
    """Decodes an image completely.

    Every bit of a JPEG is decoded, but at an eighth of its size: damage shows in the bits, and the later steps
    (transform, colours) take time and cannot fail.
    """
    from PIL import Image

    if image.format in JPEGS:
        image.draft("L", (1, 1))
        try:
            return image.load()
        except OSError:  # damaged, or a coding that cannot be scaled: decoding at full size tells which
            image = Image.open(io.BytesIO(encoded), formats=READ)
    elif image.format == "PNG":  # checks the checksums of all chunks; decoding checks only some
        Image.open(io.BytesIO(encoded), formats=READ).verify()
    image.load()


def _pixels(image, rules: Rules):
    """Returns the image rotated as its EXIF data say, resized, and as RGB, or as grey if it was 8-bit grey."""
    from PIL import Image

    white = _white(image)
    whole = image.size
    if size := rules.new_size(whole):  # decodes a JPEG at 1/2, 1/4 or 1/8 of its size if that is large enough
        image.draft(None, (2 * max(size),) * 2 if rules.resize else tuple(2 * side for side in size))
    kind, tiles = image.format, image.tile
    image = _upright(image)
    if image.mode == "CMYK":
        image = _without_inks(image, kind in JPEGS and "adobe" not in image.info)  # Pillow inverts all JPEGs
    if kind == "GIF":  # as TensorFlow does: what is transparent or outside the frame is black
        frame = image.convert("RGBA").crop(tiles[0].extents)
        image = Image.new("RGB", image.size)
        image.paste(frame, tiles[0].extents, frame)
    if white:
        image = _eight_bits(image, white)
    if image.mode != "L":
        image = image.convert("RGB")
    if size:
        is_turned = (image.width < image.height) != (whole[0] < whole[1])
        size = size[::-1] if is_turned and not rules.resize else size
        image = image.resize(size, Image.Resampling.BICUBIC)
    return image


def _upright(image):
    """Rotates the image as its EXIF data say, because the converted file has none."""
    from PIL import ImageOps

    image.load()
    for xmp in ("xmp", "XML:com.adobe.xmp"):  # data in which only Pillow looks for an orientation
        image.info.pop(xmp, None)
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged metadata do not make the image unusable
        return image


def _without_inks(image, is_inverted: bool):
    """Converts CMYK to RGB, to the bit as DALI and TensorFlow do. is_inverted: whether 0 is full ink."""
    import numpy as np
    from PIL import Image, ImageChops

    light = np.asarray(image if is_inverted else ImageChops.invert(image), np.int32)
    return Image.fromarray((light[..., :3] * light[..., 3:] // 255).astype(np.uint8))


def _white(image) -> float | None:
    """Returns the value of white in grey of more than 8 bits, or None for other images. Raises Rejected.

    Black is 0. In colour, Pillow itself keeps the upper 8 of 16 bits.
    """
    if image.mode != "F" and not image.mode.startswith("I"):
        return None
    tags = image.tag_v2 if image.format == "TIFF" else {}
    if tags.get(PHOTOMETRIC) == 0:  # Pillow inverts only 8-bit grey
        raise Rejected("0 is white in its grey of more than 8 bits; convert it to 8 bits, or so that 0 is black")
    if image.mode == "I" and image.format != "PPM":  # of a PPM, Pillow scales the largest possible value to 65535
        raise Rejected("its pixels are signed or have 32 bits, which does not tell which value is white; convert it to "
                       "8 or 16 bits")
    return 1.0 if image.mode == "F" else 4095 if tags.get(BITS) == (12,) else 65535


def _eight_bits(image, white):
    """Converts deep grey to 8-bit, rounding as DALI does. Pillow would clip the values. Raises Rejected."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(image)
    if not (pixels.min() >= 0 and pixels.max() <= white):
        raise Rejected(f"its pixels are numbers from {pixels.min():g} to {pixels.max():g} instead of 0 to {white:g}; "
                       "convert it to 8 or 16 bits")
    return Image.fromarray(np.rint(pixels * (255 / white)).astype(np.uint8))


def _histogram(image) -> list[int]:
    return (image if image.mode == "RGB" else image.convert("RGB")).histogram()


def _encoded(pixels, kind) -> bytes:
    pixels.info = {}  # drops comments and other metadata
    written = io.BytesIO()
    pixels.save(written, kind, quality=QUALITY, compress_level=1)
    return written.getvalue()
