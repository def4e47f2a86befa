"""An encoded image as it is to be stored: copied where every decoder reads it, else converted or made smaller."""
import io
import warnings
from dataclasses import dataclass

# What image collections hold. Not all that Pillow opens: some of its readers know a file by next to nothing (TGA) or
# start a program (EPS).
READ = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
QUALITY = 95
# JPEG's markers. Frames: baseline, extended, progressive. Segments: tables, application's own, comment.
START_OF_SCAN, HUFFMAN_FRAMES = 0xDA, {0xC0, 0xC1, 0xC2}
SEGMENTS = HUFFMAN_FRAMES | {0xC4, 0xDB, 0xDD, 0xFE} | set(range(0xE0, 0xF0))
SOUND_PNG = {(8, 0), (8, 2)}  # bit depth and colour type: 8-bit grey and RGB


class Rejected(Exception):
    """The image cannot be used; the message says why, the same on every machine."""


@dataclass(frozen=True)
class Rules:
    """resize_shorter: images whose shorter side is longer are made that small; 0: none. verify: decode every image."""

    resize_shorter: int = 0
    verify: bool = False


@dataclass(frozen=True)
class Stored:
    """histogram: of the pixels, 256 counts each of red, green and blue, where it was asked for."""

    encoded: bytes
    converted: bool = False
    resized: bool = False
    histogram: list[int] | None = None


def store(encoded: bytes, name: str, rules: Rules, measure: bool = False) -> Stored:
    """Raises Rejected for what is no image, and where it is decoded (to convert, verify or measure) for damage."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images and odd metadata: both are read all the same
        try:
            with Image.open(io.BytesIO(encoded), formats=READ) as image:
                return _store(image, encoded, name, rules, measure)
        except Image.UnidentifiedImageError:
            raise Rejected("not an image of a known kind") from None
        except Exception as error:  # Pillow raises anything at all for a damaged header
            raise Rejected(" ".join(str(error).split()) or type(error).__name__) from None


def added(histogram: list[int], other: list[int] | None) -> list[int]:
    """The sum of two histograms, of which either may be empty."""
    if not histogram or not other:
        return histogram or other or []
    return [a + b for a, b in zip(histogram, other, strict=True)]


def check(encoded: bytes) -> None:
    """Decodes an image. Raises Rejected."""
    store(encoded, ".png", Rules(verify=True))


def _store(image, encoded, name, rules, measure) -> Stored:
    smaller, copied = 0 < rules.resize_shorter < min(image.size), _copied(image, encoded, name)
    if smaller or not copied:
        pixels = _pixels(image, rules.resize_shorter if smaller else 0)
        if not copied:
            pixels = pixels.convert("RGB")
        return Stored(_jpeg(pixels), not copied, smaller, _histogram(pixels) if measure else None)
    if measure:
        return Stored(encoded, histogram=_histogram(image))
    if rules.verify:
        _decode(image, encoded)
    return Stored(encoded)


def _copied(image, encoded, name) -> bool:
    """Whether the bytes are stored as they are: what DALI and TensorFlow decode alike, under a name that says so."""
    if image.format in ("JPEG", "MPO"):  # an MPO is a JPEG with further ones behind it
        return image.mode in ("L", "RGB") and _tidy(encoded)
    return (image.format == "PNG" and name.lower().endswith(".png") and encoded[12:16] == b"IHDR"
            and (encoded[24], encoded[25]) in SOUND_PNG and image.mode in ("L", "RGB")
            and "transparency" not in image.info and getattr(image, "n_frames", 1) == 1)


def _tidy(jpeg) -> bool:
    """Whether a JPEG's header is segment after segment up to the picture, Huffman-coded.

    Pillow passes over rubbish between segments, DALI does not; what it decodes of other codings depends on its build.
    """
    place, coded = 2, False
    while place + 4 < len(jpeg) and jpeg[place] == 0xFF:
        marker = jpeg[place + 1]
        if marker == START_OF_SCAN:
            return coded
        if marker not in SEGMENTS:
            break
        coded = coded or marker in HUFFMAN_FRAMES
        place += 2 + int.from_bytes(jpeg[place + 2:place + 4], "big")
    return False


def _decode(image, encoded) -> None:
    """Decodes all of an image.

    Of a JPEG, every bit is decoded, but the picture is made at an eighth of its size: damage shows in the bits, and
    what follows (the transform, the colours) takes time and cannot fail.
    """
    from PIL import Image

    if image.format in ("JPEG", "MPO"):
        image.draft("L", (1, 1))
        try:
            return image.load()
        except OSError:  # damaged, or coded in a way that cannot be made smaller: the usual way tells which
            image = Image.open(io.BytesIO(encoded), formats=READ)
    elif image.format == "PNG":  # the checksums of all its chunks, of which decoding looks at some
        Image.open(io.BytesIO(encoded), formats=READ).verify()
    image.load()


def _pixels(image, shorter):
    """The image upright, as RGB (or grey where it was 8-bit grey), its shorter side made so long unless 0."""
    from PIL import Image

    long = shorter and max(shorter, round(max(image.size) * shorter / min(image.size)))
    if shorter:  # a JPEG is decoded at a half, a quarter or an eighth of its size where that is enough
        image.draft(None, tuple(2 * side * shorter // min(image.size) for side in image.size))
    image = _upright(image)
    if image.mode.startswith("I;16"):
        image = _upper_bytes(image)
    if image.mode != "L":
        image = image.convert("RGB")
    if shorter:
        size = (shorter, long) if image.width <= image.height else (long, shorter)
        image = image.resize(size, Image.Resampling.BICUBIC)
    return image


def _upright(image):
    """Turned as its metadata say, which do not outlive the conversion."""
    from PIL import ImageOps

    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged metadata are no reason to lose the picture
        return image


def _upper_bytes(image):
    """16-bit grey as 8-bit, which Pillow would clip."""
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _histogram(image) -> list[int]:
    return (image if image.mode == "RGB" else image.convert("RGB")).histogram()


def _jpeg(pixels) -> bytes:
    pixels.info = {}  # comments and the like
    written = io.BytesIO()
    pixels.save(written, "JPEG", quality=QUALITY)
    return written.getvalue()
