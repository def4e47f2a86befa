"""Writes a dataset of capital letters and digits in many typefaces, which are drawn here.

    uv run --group benchmark python -m benchmarks.glyphs FOLDER

The task is hard enough to tell training methods apart and small enough for a CPU. The validation images use typefaces
(whole families) that the training images do not have. The typeface, the character and the number of an image determine
its bytes, on every machine with the pinned packages of fonts.
"""
import importlib.util
import string
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data.images import Rules
from data.preparing.run import run
from data.preparing.shards import Preparation
from data.preparing.team import Team
from data.sources.source import Source, encode

SIZE = 28
CHARACTERS = string.ascii_uppercase + string.digits
TRAIN_FAMILIES = {
    "font_roboto": "Roboto-*.ttf", "font_source_sans_pro": "*.ttf", "font_source_serif_pro": "*.ttf",
    "font_manrope": "Manrope-[!V]*.ttf",  # all but the variable font, which repeats the others
    "matplotlib": "DejaVu*[!y].ttf",  # all but the two display faces, which lack letters
}
VALIDATION_FAMILIES = {
    "font_hanken_grotesk": "*.otf", "font_caladea": "*.ttf",
    "matplotlib": "cm[brst][1st]*.ttf",  # Computer Modern: bold, roman, sans, typewriter
}
TRAIN_COPIES, VALIDATION_COPIES = 17, 8
OVERSAMPLING = 4


def write(folder: Path) -> None:
    """Writes the dataset, unless it is there."""
    if not (folder / "dataset.json").exists():
        source = glyphs()
        run(Preparation(source, "tfrecord", 0, 0, Rules()), folder, Team(single_process=True), {})


def glyphs() -> Source:
    train, validation = faces(TRAIN_FAMILIES), faces(VALIDATION_FAMILIES)
    return Source(tuple(CHARACTERS), {"train": lambda: draw_all(train, TRAIN_COPIES, seed=0),
                                      "validation": lambda: draw_all(validation, VALIDATION_COPIES, seed=1)},
                  {"train": len(train) * len(CHARACTERS) * TRAIN_COPIES,
                   "validation": len(validation) * len(CHARACTERS) * VALIDATION_COPIES},
                  mean=(127.5,) * 3, std=(127.5,) * 3)


def faces(families: dict[str, str]) -> list[Path]:
    """Returns the font files of each family, in an order that does not depend on the machine."""
    found = []
    for package, pattern in families.items():
        if not (spec := importlib.util.find_spec(package)):
            raise SystemExit(f"benchmarks.glyphs: {package.replace('_', '-')}, a package of fonts, is not installed; "
                             "start this with `uv run --group benchmark`")
        files = sorted(Path(spec.submodule_search_locations[0]).rglob(pattern), key=lambda path: path.name)
        if not files:
            raise FileNotFoundError(f"the package {package} contains no font {pattern}")
        found += files
    return found


def draw_all(fonts: list[Path], copies: int, seed: int):
    """Yields (JPEG, label) for `copies` of each character in each font, shuffled."""
    loaded = [ImageFont.truetype(str(font), SIZE * OVERSAMPLING * 3 // 4) for font in fonts]
    shape = (len(fonts), len(CHARACTERS), copies)
    order = np.random.Generator(np.random.Philox(seed)).permutation(np.prod(shape))
    for number in order:
        font, character, copy = (int(index) for index in np.unravel_index(number, shape))
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, font, character, copy])))
        yield encode(draw(loaded[font], CHARACTERS[character], random)), character


def draw(font, character: str, random) -> np.ndarray:
    """Draws one character, rotated, sheared, scaled and shifted, in two random greys, with noise; float (28, 28)."""
    canvas = SIZE * OVERSAMPLING
    image = Image.new("L", (canvas, canvas))
    ImageDraw.Draw(image).text((canvas / 2, canvas / 2), character, fill=255, font=font, anchor="mm")
    angle, slant = np.deg2rad(random.uniform(-25, 25)), random.uniform(-0.35, 0.35)
    scale_x, scale_y = 1 / random.uniform(0.55, 1.0, size=2)
    matrix = np.array([[scale_x, slant], [0, scale_y]]) @ np.array(
        [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    shift = canvas / 2 - matrix @ (canvas / 2 + random.uniform(-canvas / 9, canvas / 9, size=2))
    moved = image.transform((canvas, canvas), Image.Transform.AFFINE,
                            (*matrix[0], shift[0], *matrix[1], shift[1]), Image.Resampling.BILINEAR)
    ink = np.asarray(moved.resize((SIZE, SIZE), Image.Resampling.BOX), np.float64) / 255
    paper, pen = random.uniform(0, 255, size=2)
    if abs(paper - pen) < 80:
        pen = (paper + 128) % 256
    return paper + (pen - paper) * ink + random.normal(0, random.uniform(5, 30), size=ink.shape)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
