"""What is stored of an image: the same bytes where every decoder reads them, else a file that shows the same."""
import io
import itertools
import struct

import numpy as np
import pillow_heif
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from data.augmentation import Augmentation
from data.images import READ, Rejected, Rules, store
from data.pipeline import decoder

pillow_heif.register_heif_opener()

RNG = np.random.Generator(np.random.Philox(5))
UPRIGHT = Image.Exif()
UPRIGHT[0x0112] = 1
SMOOTH = Image.fromarray(RNG.integers(60, 200, (3, 4, 3), dtype=np.uint8)).resize((60, 48), Image.Resampling.BICUBIC)


def encoded(image, kind, **options) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def opened(content) -> Image.Image:
    return Image.open(io.BytesIO(content))


def difference(one, other) -> float:
    return float(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).mean())


@pytest.mark.parametrize("content", [
    encoded(SMOOTH, "JPEG"), encoded(SMOOTH, "JPEG", progressive=True, subsampling=0),
    encoded(SMOOTH.convert("L"), "JPEG", comment=b"a comment"), encoded(SMOOTH, "PNG"),
    encoded(SMOOTH.convert("L"), "PNG"), encoded(SMOOTH.quantize(256), "PNG"), encoded(SMOOTH.convert("RGBA"), "PNG"),
    encoded(SMOOTH.convert("LA"), "PNG"), encoded(SMOOTH, "PNG", transparency=(1, 2, 3)),
    encoded(SMOOTH.convert("1", dither=0), "PNG"),
    encoded(SMOOTH, "PNG", save_all=True, append_images=[SMOOTH.rotate(9)]),
    encoded(SMOOTH, "WEBP", quality=90),
], ids=itertools.count())
def test_copied_byte_for_byte(content):
    for rules in (Rules(), Rules(verify=True), Rules(resize_shorter=48)):
        stored = store(content, rules, measure=True)
        assert stored.encoded == content and not stored.converted and not stored.resized
        assert stored.histogram == opened(content).convert("RGB").histogram()


@pytest.mark.parametrize(("content", "shown"), [
    (encoded(SMOOTH.convert("CMYK"), "JPEG", quality=100), SMOOTH),
    (encoded(SMOOTH, "WEBP", lossless=True, exif=UPRIGHT), SMOOTH),
    (encoded(SMOOTH, "BMP"), SMOOTH),
    (encoded(SMOOTH, "TIFF"), SMOOTH),
    (encoded(SMOOTH.convert("L"), "GIF"), SMOOTH.convert("L").convert("RGB")),
    (encoded(SMOOTH, "PNG", save_all=True, default_image=True, append_images=[SMOOTH.rotate(180)] * 2), SMOOTH),
], ids=itertools.count())
def test_converted_without_loss(content, shown):
    stored = store(content, Rules(), measure=True)
    image = opened(stored.encoded)
    assert stored.converted and image.format == "PNG" and image.size == SMOOTH.size
    assert difference(image.convert("RGB"), shown) < (1 if content[:2] == b"\xff\xd8" else 1e-9)
    assert stored.histogram == image.convert("RGB").histogram()


def test_a_photo_of_a_phone_becomes_a_jpeg():
    stored = store(encoded(SMOOTH, "HEIF", quality=90), Rules(), measure=True)
    image = opened(stored.encoded)
    assert stored.converted and image.format == "JPEG" and image.mode == "RGB" and difference(image, SMOOTH) < 4
    assert difference(np.array(stored.histogram).reshape(3, 256) @ np.arange(256),
                      np.asarray(SMOOTH).sum(axis=(0, 1))) < 0.02 * np.asarray(SMOOTH).sum()


def png(width, height, depth, colour, rows) -> bytes:
    import zlib

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


RAMP = np.linspace(0, 1, 60 * 48).reshape(48, 60)  # black to white
SIXTEEN, TWELVE = np.rint(RAMP * 65535).astype(np.uint16), np.rint(RAMP * 4095).astype(np.uint16)
GREY, FLOATS, SIGNED, WHITE_IS_ZERO = 1, 3, 2, 0  # of TIFF: photometric interpretation and sample formats


def tiff(pixels: bytes, bits: int, photometric: int = GREY, sample_format: int = 1) -> bytes:
    """A grey TIFF of the size of RAMP, by the letter of TIFF 6.0."""
    tags = [(256, 60), (257, 48), (258, bits), (259, 1), (262, photometric), (273, 8 + 2 + 12 * 10 + 4), (277, 1),
            (278, 48), (279, len(pixels)), (339, sample_format)]
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + fields + struct.pack("<I", 0) + pixels


def twelve_bits(values) -> bytes:
    return b"".join(int(a << 12 | b).to_bytes(3, "big") for a, b in values.reshape(-1, 2).astype(int))


def pnm(largest: int, values) -> bytes:
    return b"P5\n60 48\n%d\n" % largest + values.astype(">u2").tobytes()


DEEP = {
    "16-bit pgm": pnm(65535, SIXTEEN), "12-bit pgm": pnm(4095, TWELVE),
    "plain pgm": b"P2\n60 48\n4095\n" + b" ".join(b"%d" % value for value in TWELVE.flat),
    "pfm": b"Pf\n60 48\n-1.0\n" + RAMP[::-1].astype("<f4").tobytes(),  # from the last row to the first
    "16-bit png": encoded(Image.fromarray(SIXTEEN), "PNG"),
    "16-bit jpeg 2000": encoded(Image.fromarray(SIXTEEN), "JPEG2000"),
    "16-bit tiff": tiff(SIXTEEN.astype("<u2").tobytes(), 16),
    "big-endian tiff": encoded(Image.frombytes("I;16B", (60, 48), SIXTEEN.astype(">u2").tobytes()), "TIFF"),
    "12-bit tiff": tiff(twelve_bits(TWELVE), 12),
    "float tiff": tiff(RAMP.astype("<f4").tobytes(), 32, sample_format=FLOATS),
}


@pytest.mark.parametrize("kind", DEEP)
def test_deep_grey_keeps_its_brightness(kind):
    stored = store(DEEP[kind], Rules(), measure=True)
    assert stored.converted and np.abs(np.asarray(opened(stored.encoded), float) - 255 * RAMP).max() <= 1
    assert np.array(stored.histogram[:256]) @ np.arange(256) / RAMP.size == pytest.approx(127.5, abs=0.1)
    small = opened(store(DEEP[kind], Rules(resize_shorter=12)).encoded)
    assert small.size == (15, 12) and np.asarray(small, float).mean() == pytest.approx(127.5, abs=1)


@pytest.mark.parametrize(("pixels", "bits", "photometric", "sample_format", "reason"), [
    ((RAMP * 4294967295).astype("<u4"), 32, GREY, 1, "signed or have 32 bits"),
    ((RAMP * 2147483647).astype("<i4"), 32, GREY, SIGNED, "signed or have 32 bits"),
    ((RAMP * 65535 - 32768).astype("<i2"), 16, GREY, SIGNED, "signed or have 32 bits"),
    ((RAMP * 255).astype("<f4"), 32, GREY, FLOATS, "from 0 to 255 instead of 0 to 1"),
    ((RAMP - 0.5).astype("<f4"), 32, GREY, FLOATS, "from -0.5 to 0.5 instead of 0 to 1"),
    ((RAMP * np.nan).astype("<f4"), 32, GREY, FLOATS, "from nan to nan"),
    (SIXTEEN.astype("<u2"), 16, WHITE_IS_ZERO, 1, "0 is white"),
    (RAMP.astype("<f4"), 32, WHITE_IS_ZERO, FLOATS, "0 is white"),
])
def test_grey_without_a_known_white_is_refused(pixels, bits, photometric, sample_format, reason):
    with pytest.raises(Rejected, match=reason):
        store(tiff(pixels.tobytes(), bits, photometric, sample_format), Rules())


def test_deep_grey_is_turned_upright():
    turned = Image.Exif()
    turned[0x0112] = 6
    stored = store(encoded(Image.fromarray(SIXTEEN), "TIFF", exif=turned), Rules())
    assert difference(opened(stored.encoded), np.rot90(255 * RAMP, -1)) < 1


@pytest.mark.parametrize(("size", "expected"), [((60, 48), (30, 24)), ((48, 61), (24, 30)), ((500, 331), (36, 24)),
                                                ((24, 800), (24, 800)), ((23, 23), (23, 23))])
def test_resized_like_a_full_decode_and_one_antialiased_step(size, expected):
    image = SMOOTH.resize(size, Image.Resampling.BICUBIC)
    content = encoded(image, "JPEG", quality=95)
    stored = store(content, Rules(resize_shorter=24))
    assert opened(stored.encoded).size == expected and stored.resized == (size != expected) and not stored.converted
    if stored.resized:
        assert difference(opened(stored.encoded), image.resize(expected, Image.Resampling.LANCZOS)) < 4
    else:
        assert stored.encoded == content


@pytest.mark.parametrize("size", [(60, 48), (20, 500), (24, 30)])
def test_both_sides_get_their_size(size):
    image = SMOOTH.resize(size, Image.Resampling.BICUBIC)
    content = encoded(image, "JPEG", quality=95)
    stored = store(content, Rules(resize=(24, 30)))
    assert opened(stored.encoded).size == (24, 30) and stored.resized == (size != (24, 30))
    assert difference(opened(stored.encoded), image.resize((24, 30), Image.Resampling.LANCZOS)) < 6


def test_orientation_is_kept_when_copied_and_applied_when_made_anew():
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown turned clockwise
    content = encoded(SMOOTH, "JPEG", exif=turned, quality=95)
    assert store(content, Rules()).encoded == content
    small = opened(store(content, Rules(resize_shorter=24)).encoded)
    assert small.size == (24, 30) and not small.getexif()
    assert difference(small, SMOOTH.transpose(Image.Transpose.ROTATE_270).resize((24, 30))) < 8
    both = opened(store(content, Rules(resize=(20, 40))).encoded)
    assert difference(both, SMOOTH.transpose(Image.Transpose.ROTATE_270).resize((20, 40))) < 8


def test_an_orientation_in_xmp_does_not_count():
    """Of the decoders, Pillow alone looks there."""
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    for content in (encoded(SMOOTH, "JPEG", xmp=xmp), encoded(SMOOTH, "WEBP", xmp=xmp)):
        assert ImageOps.exif_transpose(opened(content)).size == (48, 60)
        assert opened(store(content, Rules(resize_shorter=24)).encoded).size == (30, 24)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_of_a_phone_is_turned_upright(orientation):
    """HEIC says it in properties of its own, so that its Exif says it again. Compared with what Exif says in a JPEG."""
    turned = Image.Exif()
    turned[0x0112] = orientation
    content = encoded(SMOOTH, "HEIF", exif=turned.tobytes(), quality=90)
    assert (b"irot" in content or b"imir" in content) == (orientation > 1)
    upright = ImageOps.exif_transpose(opened(encoded(SMOOTH, "JPEG", exif=turned, quality=95)))
    stored = opened(store(content, Rules()).encoded)
    assert stored.size == upright.size and not stored.getexif() and difference(stored, upright) < 4
    small = opened(store(content, Rules(resize_shorter=24)).encoded)
    assert min(small.size) == 24 and difference(small, upright.resize(small.size)) < 8


def test_the_first_frame_of_an_animation_counts():
    frames = [SMOOTH.convert("L"), Image.new("L", SMOOTH.size)]
    stored = store(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), Rules())
    assert stored.converted and difference(opened(stored.encoded).convert("RGB"), frames[0].convert("RGB")) == 0


@pytest.mark.parametrize("content", [
    b"", b"hello", b"\xff\xd8\xff", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", encoded(SMOOTH, "TGA"),
    png(50_000, 50_000, 8, 0, b"")])
def test_no_images(content):
    """The last is small and claims more pixels than memory should be spent on."""
    with pytest.raises(Rejected) as rejected:
        store(content, Rules())
    assert "0x" not in str(rejected.value)  # no address: the message is the same in every run


def test_only_verifying_notices_a_truncated_jpeg():
    """The end of a PNG is always looked at."""
    jpeg, png = (encoded(SMOOTH, kind)[:-60] for kind in ("JPEG", "PNG"))
    assert store(jpeg, Rules()).encoded == jpeg
    for content, rules, measure in ((jpeg, Rules(verify=True), False), (jpeg, Rules(resize_shorter=20), False),
                                    (jpeg, Rules(), True), (png, Rules(), False)):
        with pytest.raises(Rejected, match=r"[Tt]runcated"):
            store(content, rules, measure)


def test_rgb_on_disk_is_verified_too():
    """A JPEG without a change of colours, which is decoded another way than most."""
    content = encoded(SMOOTH, "JPEG", keep_rgb=True)
    assert store(content, Rules(verify=True)).encoded == content
    with pytest.raises(Rejected):
        store(content[:-60], Rules(verify=True))


def test_rubbish_in_a_header_is_not_handed_on():
    """Pillow passes over bytes between two segments, DALI refuses them: such a file is written anew."""
    content = encoded(SMOOTH, "JPEG")
    stored = store(content[:20] + b"rubbish" + content[20:], Rules())
    assert stored.converted and difference(opened(stored.encoded), opened(content)) < 1


TURNED = Image.Exif()
TURNED[0x0112] = 6
BASES = [encoded(image.resize((24, 20)), kind, **options)
         for image in (SMOOTH, SMOOTH.convert("L"), SMOOTH.quantize(9))
         for kind, options in (
             ("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("JPEG", {"exif": TURNED}), ("GIF", {}),
             ("WEBP", {}), ("TIFF", {}), ("BMP", {}), ("HEIF", {}))
         if image.mode != "P" or kind not in ("JPEG", "HEIF")]


@st.composite
def damaged(draw):
    content = bytearray(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 4))):
        offset = draw(st.integers(0, max(min(len(content), 700) - 1, 0)))
        match draw(st.sampled_from("scdt")):
            case "s":
                content[offset:offset + 1] = bytes([draw(st.integers(0, 255))])
            case "c":
                content[offset:offset] = draw(st.binary(min_size=1, max_size=12))
            case "d":
                del content[offset:offset + draw(st.integers(1, 12))]
            case _:
                del content[offset + 1:]
    return bytes(content)


@pytest.mark.filterwarnings("ignore")  # of Pillow, about damage
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(damaged(), st.sampled_from([0, 10]))
def test_damaged_headers_are_rejected_or_decode(decodes, damage, shorter):
    """Whatever is in a file: no crash, and what is accepted as verified decodes in DALI, as training does it."""
    try:
        stored = store(damage, Rules(resize_shorter=shorter, verify=True))
    except Rejected as error:
        assert str(error) and "\n" not in str(error)
        assert shorter or not sound(damage)
        return
    decodes(stored.encoded)
    assert sound(stored.encoded)


def sound(content) -> bool:
    """Whether Pillow decodes it, by itself."""
    try:
        Image.open(io.BytesIO(content), formats=READ).load()
        if content.startswith(b"\x89PNG"):
            Image.open(io.BytesIO(content)).verify()
    except Exception:
        return False
    return True


@pytest.fixture(scope="module")
def decodes():
    pipelines = [decoder(Augmentation(enlarge=None))]

    def run(content):
        try:
            pipelines[0].feed_input("encoded", [np.frombuffer(content, np.uint8)])
            pipelines[0].run()
        except RuntimeError:
            pipelines[0] = decoder(Augmentation(enlarge=None))  # after an error, it is of no use
            raise

    run(BASES[0])
    with pytest.raises(RuntimeError):
        run(b"no image")
    return run
