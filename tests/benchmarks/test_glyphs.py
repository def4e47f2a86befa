"""Glyphs: the same bytes on every machine, typefaces kept apart, enough of them."""
import hashlib
import itertools

import numpy as np
import pytest
from conftest import require_fonts

from benchmarks import glyphs
from data.dataset import open_dataset

GOLDEN = "dd7abe8d074e97b48c9ed94c7956f74f1264974695005a778406c6a772f2b573"


@pytest.fixture
def fonts():
    require_fonts()


@pytest.mark.usefixtures("fonts")
def test_the_first_images_are_the_same_bytes_everywhere():
    """GOLDEN is of the pinned packages. A change of these bytes wants a new benchmarks/accuracy.json."""
    source = glyphs.glyphs()
    digest = hashlib.sha256()
    for split in ("train", "validation"):
        for image, label in itertools.islice(source.splits[split](), 300):
            digest.update(image + bytes([label]))
    assert digest.hexdigest() == GOLDEN


@pytest.mark.usefixtures("fonts")
def test_validation_typefaces_are_never_trained_on():
    train, validation = glyphs.faces(glyphs.TRAIN_FAMILIES), glyphs.faces(glyphs.VALIDATION_FAMILIES)

    def families(paths):
        return {path.stem.split("-")[0][:6] for path in paths}

    assert len(train) == 55 and len(validation) == 18 and not families(train) & families(validation)
    assert len(train) * 36 * glyphs.TRAIN_COPIES >= 20_000


@pytest.mark.usefixtures("fonts")
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


@pytest.mark.usefixtures("fonts")
def test_a_set_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(glyphs, "TRAIN_COPIES", 1)
    monkeypatch.setattr(glyphs, "VALIDATION_COPIES", 1)
    for _ in range(2):
        glyphs.write(tmp_path / "set")
    opened = open_dataset(tmp_path / "set")
    assert opened.train.samples == 55 * 36 and opened.validation.samples == 18 * 36
    [expected, *_] = glyphs.glyphs().splits["train"]()
    [first] = opened.train.kind.records(opened.train.paths[0], opened.train.entries[0], np.arange(1))
    assert first == expected and opened.mean == opened.std == (127.5,) * 3
