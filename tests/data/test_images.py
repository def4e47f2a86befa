"""What is stored of an image: the same bytes where every decoder reads them, else a JPEG that shows the same."""
import io
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from data.preparing.images import READ, Rejected, Rules, store

RNG = np.random.Generator(np.random.Philox(5))
SMOOTH = Image.fromarray(RNG.integers(60, 200, (3, 4, 3), dtype=np.uint8)).resize((60, 48), Image.Resampling.BICUBIC)


def encoded(image, kind, **options) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def opened(content) -> Image.Image:
    return Image.open(io.BytesIO(content))


def difference(one, other) -> float:
    return float(np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64)).mean())


@pytest.mark.parametrize(("name", "content"), [
    ("a.jpg", encoded(SMOOTH, "JPEG")),
    ("a.JPEG", encoded(SMOOTH, "JPEG", progressive=True, subsampling=0)),
    ("grey.jpg", encoded(SMOOTH.convert("L"), "JPEG", comment=b"a comment")),
    ("named.png", encoded(SMOOTH, "JPEG")),  # what it is counts, DALI looks at nothing else
    ("a.png", encoded(SMOOTH, "PNG")),
    ("GREY.PNG", encoded(SMOOTH.convert("L"), "PNG")),
])
def test_copied_byte_for_byte(name, content):
    for rules in (Rules(), Rules(verify=True), Rules(resize_shorter=48)):
        stored = store(content, name, rules, measure=True)
        assert stored.encoded == content and not stored.converted and not stored.resized
        assert stored.histogram == opened(content).convert("RGB").histogram()


@pytest.mark.parametrize(("name", "content", "shown"), [
    ("png.JPEG", encoded(SMOOTH, "PNG"), SMOOTH),
    ("cmyk.jpg", encoded(SMOOTH.convert("CMYK"), "JPEG"), SMOOTH),
    ("a.webp", encoded(SMOOTH, "WEBP", lossless=True), SMOOTH),
    ("a.bmp", encoded(SMOOTH, "BMP"), SMOOTH),
    ("a.tif", encoded(SMOOTH, "TIFF"), SMOOTH),
    ("a.gif", encoded(SMOOTH.convert("L"), "GIF"), SMOOTH.convert("L").convert("RGB")),
    ("palette.png", encoded(SMOOTH.quantize(256), "PNG"), SMOOTH.quantize(256).convert("RGB")),
    ("alpha.png", encoded(SMOOTH.convert("RGBA"), "PNG"), SMOOTH),
    ("grey alpha.png", encoded(SMOOTH.convert("LA"), "PNG"), SMOOTH.convert("L").convert("RGB")),
    ("key.png", encoded(SMOOTH, "PNG", transparency=(1, 2, 3)), SMOOTH),
    ("deep.png", encoded(Image.fromarray(np.asarray(SMOOTH.convert("L")).astype(np.uint16) * 257), "PNG"),
     SMOOTH.convert("L").convert("RGB")),
    ("bits.png", encoded(SMOOTH.convert("1", dither=0), "PNG"), None),
])
def test_converted_to_an_rgb_jpeg_that_shows_the_same(name, content, shown):
    stored = store(content, name, Rules(), measure=True)
    image = opened(stored.encoded)
    assert stored.converted and image.format == "JPEG" and image.mode == "RGB" and image.size == SMOOTH.size
    if shown is not None:
        assert difference(image, shown) < 4
        assert difference(np.array(stored.histogram).reshape(3, 256) @ np.arange(256),
                          np.asarray(shown).sum(axis=(0, 1))) < 0.02 * np.asarray(shown).sum()


def test_colour_of_16_bits_is_converted():
    pixels = np.asarray(SMOOTH)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels.astype(np.uint16) * 257)
    stored = store(png(60, 48, 16, 2, rows), "deep.png", Rules())
    assert stored.converted and difference(opened(stored.encoded), SMOOTH) < 4


def png(width, height, depth, colour, rows) -> bytes:
    import zlib

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


@pytest.mark.parametrize(("size", "expected"), [((60, 48), (30, 24)), ((48, 61), (24, 30)), ((500, 331), (36, 24)),
                                                ((24, 800), (24, 800)), ((23, 23), (23, 23))])
def test_resized_like_a_full_decode_and_one_antialiased_step(size, expected):
    image = SMOOTH.resize(size, Image.Resampling.BICUBIC)
    content = encoded(image, "JPEG", quality=95)
    stored = store(content, "a.jpg", Rules(resize_shorter=24))
    assert opened(stored.encoded).size == expected and stored.resized == (size != expected) and not stored.converted
    if stored.resized:
        assert difference(opened(stored.encoded), image.resize(expected, Image.Resampling.LANCZOS)) < 4
    else:
        assert stored.encoded == content


def test_orientation_is_kept_when_copied_and_applied_when_made_anew():
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown turned clockwise
    content = encoded(SMOOTH, "JPEG", exif=turned, quality=95)
    assert store(content, "a.jpg", Rules()).encoded == content
    small = opened(store(content, "a.jpg", Rules(resize_shorter=24)).encoded)
    assert small.size == (24, 30) and not small.getexif()
    assert difference(small, SMOOTH.transpose(Image.Transpose.ROTATE_270).resize((24, 30))) < 8


@pytest.mark.parametrize("content", [
    b"", b"hello", b"\xff\xd8\xff", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", encoded(SMOOTH, "TGA"),
    png(50_000, 50_000, 8, 0, b"")])
def test_no_images(content):
    """The last is small and claims more pixels than memory should be spent on."""
    with pytest.raises(Rejected) as rejected:
        store(content, "a.jpg", Rules())
    assert "0x" not in str(rejected.value)  # no address: the message is the same in every run


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_only_verifying_notices_a_truncated_image(kind):
    content = encoded(SMOOTH, kind)[:-60]
    assert store(content, "a.png", Rules()).encoded == content
    for rules, measure in ((Rules(verify=True), False), (Rules(resize_shorter=20), False), (Rules(), True)):
        with pytest.raises(Rejected, match=r"[Tt]runcated"):
            store(content, "a.png", rules, measure)


def test_rgb_on_disk_is_verified_too():
    """A JPEG without a change of colours, which is decoded another way than most."""
    content = encoded(SMOOTH, "JPEG", keep_rgb=True)
    assert store(content, "a.jpg", Rules(verify=True)).encoded == content
    with pytest.raises(Rejected):
        store(content[:-60], "a.jpg", Rules(verify=True))


def test_rubbish_in_a_header_is_not_handed_on():
    """Pillow passes over bytes between two segments, DALI refuses them: such a file is written anew."""
    content = encoded(SMOOTH, "JPEG")
    stored = store(content[:20] + b"rubbish" + content[20:], "a.jpg", Rules())
    assert stored.converted and difference(opened(stored.encoded), opened(content)) < 1


BASES = [(encoded(image.resize((24, 20)), kind, **options), name)
         for image in (SMOOTH, SMOOTH.convert("L")) for kind, name, options in (
             ("JPEG", "a.jpg", {}), ("JPEG", "a.jpg", {"progressive": True}), ("PNG", "a.png", {}),
             ("GIF", "a.gif", {}), ("WEBP", "a.webp", {}), ("TIFF", "a.tif", {}), ("BMP", "a.bmp", {}))]


@st.composite
def damaged(draw):
    content, name = draw(st.sampled_from(BASES))
    content = bytearray(content)
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
    return bytes(content), name


@pytest.mark.filterwarnings("ignore")  # of Pillow, about damage
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(damaged(), st.sampled_from([0, 10]))
def test_damaged_headers_are_rejected_or_decode(decodes, damage, shorter):
    """Whatever is in a file: no crash, and what is accepted as verified decodes in DALI, another decoder."""
    try:
        stored = store(*damage, Rules(resize_shorter=shorter, verify=True))
    except Rejected as error:
        assert str(error) and "\n" not in str(error)
        assert shorter or not sound(damage[0])
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
    from nvidia import dali
    from nvidia.dali import fn, types

    given_now = []

    def build():
        pipeline = dali.Pipeline(batch_size=1, num_threads=1, device_id=None, exec_pipelined=False, exec_async=False)
        with pipeline:
            read = fn.external_source(source=lambda: [np.frombuffer(given_now[0], np.uint8)], dtype=types.UINT8)
            pipeline.set_outputs(fn.decoders.image(read, device="cpu", output_type=types.RGB))
        pipeline.build()
        return pipeline

    pipeline = build()

    def run(content):
        given_now[:] = [content]
        pipeline.run()

    run(BASES[0][0])
    with pytest.raises(RuntimeError):
        run(b"no image")
    pipeline = build()
    return run
