"""Glyphs: the same bytes on every machine, typefaces kept apart, enough of them; and the prepare command."""
import hashlib
import itertools
import json

from conftest import run

from data.sources import glyphs

GOLDEN = "dd7abe8d074e97b48c9ed94c7956f74f1264974695005a778406c6a772f2b573"


def test_the_first_images_are_the_same_bytes_everywhere():
    """GOLDEN is of the pinned packages. A change of these bytes wants a new glyphs.VERSION."""
    source = glyphs.glyphs()
    digest = hashlib.sha256()
    for split in ("train", "validation"):
        for image, label in itertools.islice(source.splits[split](), 300):
            digest.update(image + bytes([label]))
    assert digest.hexdigest() == GOLDEN


def test_validation_typefaces_are_never_trained_on():
    train, validation = glyphs.faces(glyphs.TRAIN_FAMILIES), glyphs.faces(glyphs.VALIDATION_FAMILIES)

    def families(paths):
        return {path.stem.split("-")[0][:6] for path in paths}

    assert len(train) == 55 and len(validation) == 18 and not families(train) & families(validation)
    assert len(train) * 36 * glyphs.TRAIN_COPIES >= 20_000


def test_every_character_is_drawn_in_every_typeface():
    """No face lacks a letter: no two characters of a face, undistorted, are the same picture."""
    from PIL import Image, ImageDraw, ImageFont

    for path in glyphs.faces(glyphs.TRAIN_FAMILIES) + glyphs.faces(glyphs.VALIDATION_FAMILIES):
        font, pictures = ImageFont.truetype(str(path), 40), set()
        for character in glyphs.CHARACTERS:
            image = Image.new("L", (64, 64))
            ImageDraw.Draw(image).text((32, 32), character, fill=255, font=font, anchor="mm")
            pictures.add(image.tobytes())
        assert len(pictures) >= 35, path.name  # O and 0 may be one


def test_the_prepare_command(tmp_path):
    done = run("python", 1, "-m", "data.prepare", "--source=digits", f"--output={tmp_path}/a b")
    assert done.returncode == 0 and "1,437 training and 360 validation images of 10 classes" in done.stderr
    described = json.loads((tmp_path / "a b" / "dataset.json").read_text())
    assert described["train"]["samples"] == 1437 and described["format"] == "tfrecord"
    again = run("python", 1, "-m", "data.prepare", "--source=digits", f"--output={tmp_path}/a b")
    assert again.returncode == 1 and len(again.stderr.splitlines()) == 1
    assert "already contains a prepared dataset" in again.stderr
    missing = run("python", 1, "-m", "data.prepare", "--source=nothing", f"--output={tmp_path}/x")
    assert missing.returncode == 1 and missing.stderr == "data.prepare: --source: there is no folder nothing\n"
