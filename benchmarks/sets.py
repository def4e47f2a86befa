"""Sets of small photographs in classes, for benchmarks.small_sets.

    uv run --group benchmark python -m benchmarks.sets digits FOLDER --images=100

`shapes`, `textures` and `flowers` are drawn. `digits`, `stamps` and `clothes` lie over photographs that scikit-learn
and scikit-image ship (benchmarks.photos), and come from packages of Debian 12: digits in the fonts of FONTS, stamps of
Tux Paint (tuxpaint-stamps-default), and Fashion-MNIST (dataset-fashion-mnist). The validation images show other fonts,
stamps and clothes. The same packages always give the same files.
"""
import argparse
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks.photos import originals, random_part
from data.sources import idx
from data.sources.fashion import FOLDERS

WIDTH, HEIGHT, VALIDATION = 240, 180, 50
FONTS = (  # of packages fonts-NAME
    "adf-accanthis adf-baskervald adf-gillius adf-universalis aoyagi-soseki beteckna breip cantarell comfortaa "
    "crosextra-caladea crosextra-carlito dejavu-core dejavu-extra dosis dustin ebgaramond ecolier-court essays1743 "
    "fantasque-sans firacode freefont-ttf goudybookletter hack humor-sans inconsolata isabella junicode jura lato "
    "league-spartan liberation2 linuxlibertine mononoki noto-mono open-sans play quicksand roboto-unhinted rufscript "
    "tomsontalks urw-base35 vollkorn yanone-kaffeesatz")
SYMBOLS = ("D050000L", "StandardSymbolsPS")  # fonts without digits
STAMPS = ("animals/mammals", "animals/birds", "food/fruit", "plants/flowers", "town/houses")
HELD_OUT = 4  # each fourth package of fonts and each fourth stamp is for validation


def background(random) -> np.ndarray:
    """Returns smooth colours and noise under a gradient of light, float (HEIGHT, WIDTH, 3)."""
    tones = random.uniform(60, 200) + random.normal(0, 25, (4, 5, 3))
    small = Image.fromarray(np.clip(tones, 0, 255).astype(np.uint8)).resize((WIDTH, HEIGHT), Image.BICUBIC)
    light = np.linspace(*random.uniform(0.6, 1.2, 2), WIDTH)[None, :, None]
    return np.clip(np.asarray(small) * light + random.normal(0, 10, (HEIGHT, WIDTH, 3)), 0, 255)


def shapes(random, label: int, _) -> Image.Image:
    """A bright triangle, square or circle of any colour, size, angle and place, on a noisy background."""
    picture = Image.fromarray((0.6 * background(random)).astype(np.uint8))
    radius, angle = random.uniform(30, 60), random.uniform(0, 2 * np.pi)
    centre = random.uniform([radius, radius], [WIDTH - radius, HEIGHT - radius])
    turns = angle + 2 * np.pi * np.arange((3, 4, 60)[label]) / (3, 4, 60)[label]
    corners = centre + radius * np.stack([np.cos(turns), np.sin(turns)], axis=1)
    ImageDraw.Draw(picture).polygon([*map(tuple, corners)], fill=tuple(random.integers(180, 256, 3).tolist()))
    return picture


def textures(random, label: int, _) -> Image.Image:
    """Waves under noise: horizontal, vertical, diagonal or crossed, of any colour and length."""
    x, y = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    angle = (0.0, np.pi / 2, np.pi / 4, 0.0)[label] + random.normal(0, 0.15)
    length = random.uniform(10, 30)
    waves = np.sin(2 * np.pi * (x * np.sin(angle) + y * np.cos(angle)) / length + random.uniform(0, 6))
    if label == 3:
        waves = (waves + np.sin(2 * np.pi * (x * np.cos(angle) - y * np.sin(angle)) / length)) / 1.4
    tinted = random.uniform(15, 45) * waves[..., None] * random.uniform(0.3, 1.0, 3)
    return Image.fromarray(np.clip(background(random) + tinted, 0, 255).astype(np.uint8))


def flowers(random, label: int, _) -> Image.Image:
    """Flowers of five kinds, which differ in the number of petals and, with overlap, in colour and length."""
    picture = Image.fromarray((background(random) * [0.6, 1.0, 0.6]).astype(np.uint8))
    drawn, petals = ImageDraw.Draw(picture), (4, 5, 6, 9, 14)[label]
    for _ in range(random.integers(1, 4)):
        hue = int(50 * label + random.normal(0, 22)) % 256
        colour = tuple(np.asarray(Image.new("HSV", (1, 1), (hue, int(random.integers(120, 255)), 230)).convert("RGB"))[
            0, 0].tolist())
        centre, size = random.uniform([40, 40], [WIDTH - 40, HEIGHT - 40]), random.uniform(22, 45)
        for turn in random.uniform(0, 6) + 2 * np.pi * np.arange(petals) / petals:
            x, y = centre + 0.6 * size * np.array([np.cos(turn), np.sin(turn)])
            half = size * 1.3 / petals + 2
            drawn.ellipse((x - half, y - half, x + half, y + half), fill=colour)
        x, y = centre
        drawn.ellipse((x - size / 4, y - size / 4, x + size / 4, y + size / 4), fill=(240, 200, 40))
    return picture


@cache
def files_of(packages: tuple[str, ...], suffixes: tuple[str, ...]) -> list[Path]:
    """Returns the files with these suffixes in packages of Debian, by package and name."""
    listed = []
    for package in packages:
        done = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"the package {package} is missing; run apt-get install {' '.join(packages)}")
        listed += sorted(Path(line) for line in done.stdout.splitlines() if line.endswith(suffixes))
    return listed


def chosen(things: list, split: str) -> list:
    """Returns the things that a split has."""
    return [thing for number, thing in enumerate(things) if (number % HELD_OUT == HELD_OUT - 1) == (split == "val")]


@cache
def photographs() -> list[Image.Image]:
    return originals()


def over_a_photograph(random, image: Image.Image) -> Image.Image:
    """Puts an image with transparency, of any size and angle, anywhere on a part of a photograph."""
    photograph = photographs()[random.integers(len(photographs()))]
    picture = random_part(random, photograph, WIDTH, HEIGHT, 0.4)
    image = image.crop(image.getchannel("A").getbbox())
    image.thumbnail([random.uniform(70, 140)] * 2)
    image = image.rotate(random.uniform(-15, 15), Image.BICUBIC, expand=True)
    corner = random.uniform(0, np.maximum([WIDTH - image.width, HEIGHT - image.height], 1)).astype(int)
    picture.paste(image, tuple(corner.tolist()), image)
    return picture


def digits(random, label: int, split: str) -> Image.Image:
    """A digit of any colour in one of some 380 fonts."""
    packages = tuple(f"fonts-{name}" for name in chosen(FONTS.split(), split))
    fonts = [path for path in files_of(packages, (".ttf", ".otf")) if path.stem not in SYMBOLS]
    font = ImageFont.truetype(str(fonts[random.integers(len(fonts))]), 160)
    drawn = Image.new("RGBA", (400, 400))
    ImageDraw.Draw(drawn).text((100, 80), str(label), font=font, fill=tuple(random.integers(0, 256, 3).tolist()))
    return over_a_photograph(random, drawn)


def stamps(random, label: int, split: str) -> Image.Image:
    """A photograph or drawing of a mammal, a bird, fruit, a flower or a house, mirrored or not."""
    files = chosen([path for path in files_of(("tuxpaint-stamps-default",), (".png",))
                    if f"stamps/{STAMPS[label]}/" in str(path)], split)
    stamp = Image.open(files[random.integers(len(files))]).convert("RGBA")
    return over_a_photograph(random, stamp.transpose(Image.FLIP_LEFT_RIGHT) if random.random() < 0.5 else stamp)


@cache
def fashion(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pictures, uint8 (n, 28, 28), and labels of a split of Fashion-MNIST."""
    return idx.read(Path(FOLDERS[-1]))["train" if split == "train" else "validation"]


def clothes(random, label: int, split: str) -> Image.Image:
    """A picture of Fashion-MNIST in one colour, cut out where it is black."""
    pictures, labels = fashion(split)
    grey = Image.fromarray(pictures[random.choice(np.flatnonzero(labels == label))]).resize((140, 140), Image.BICUBIC)
    tinted = np.asarray(grey)[..., None] / 255 * random.uniform(100, 255, 3)
    alpha = np.clip(np.asarray(grey, np.float32)[..., None] * 4, 0, 255)
    return over_a_photograph(random, Image.fromarray(np.concatenate([tinted, alpha], axis=2).astype(np.uint8)))


SETS = {"shapes": (shapes, 3), "textures": (textures, 4), "flowers": (flowers, 5), "digits": (digits, 10),
        "stamps": (stamps, len(STAMPS)), "clothes": (clothes, 10)}


def make(folder: Path, name: str, images: int) -> None:
    """Writes JPEGs into folder/train/CLASS, `images` of each class, and VALIDATION of each into folder/val/CLASS."""
    draw, classes = SETS[name]
    for part, (split, count) in enumerate((("train", images), ("val", VALIDATION))):
        for label in range(classes):
            (folder / split / f"class-{label}").mkdir(parents=True, exist_ok=True)
            for number in range(count):
                picture = draw(np.random.default_rng([part, label, number]), label, split)
                picture.save(folder / split / f"class-{label}" / f"{number:04}.jpg", quality=85)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("set", choices=SETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=100, help="per class")
    options = parser.parse_args()
    make(options.folder, options.set, options.images)


if __name__ == "__main__":
    main()
