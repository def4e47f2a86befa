"""Glyphs: the same bytes on every machine, typefaces kept apart, enough of them; and the prepare command."""
import hashlib
import itertools
import json
import sys

import pytest
from conftest import require_fonts, run

import train
from data import prepare
from data.sources import glyphs

GOLDEN = "dd7abe8d074e97b48c9ed94c7956f74f1264974695005a778406c6a772f2b573"


@pytest.fixture
def fonts():
    require_fonts()


@pytest.mark.usefixtures("fonts")
def test_the_first_images_are_the_same_bytes_everywhere():
    """GOLDEN is of the pinned packages. A change of these bytes wants a new glyphs.VERSION."""
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


@pytest.mark.parametrize(("program", "main", "flags"), [
    ("train.py", train.main, ("--data_dir=glyphs", "--dry_run")),
    ("data.prepare", prepare.main, ("--source=glyphs", "--output={here}/output"))])
def test_without_the_fonts_one_line_says_how_to_install_them(program, main, flags, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "font_roboto", None)  # as if it were not installed
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main([program, *(flag.format(here=tmp_path) for flag in flags)]) == 1
    assert capfd.readouterr().err == (f"{program}: glyphs: font-roboto, a package of fonts, is not installed; run the "
                                      "same command with `uv run --extra study`\n")
    assert not [path for path in tmp_path.rglob("*") if path.name not in ("cache", "bigbatch")]


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
