"""Photographic JPEGs for benchmarks: crops of the photographs that scikit-learn and scikit-image ship.

    uv run --group benchmark python -m benchmarks.photos FOLDER --size=290x550    the size in the GTC slides

The same packages always give the same files. Size and quality are those of ImageNet's training images: about 500x375
pixels and 45 KB.
"""
import argparse
from pathlib import Path

import numpy as np

NAMES = ("astronaut", "chelsea", "coffee", "rocket", "retina", "hubble_deep_field", "motorcycle_left")
SIZES = ((500, 375), (375, 500), (500, 333), (500, 400))
QUALITY = 90
CLASSES = 10


def make(folder: Path, count: int, sizes: tuple[tuple[int, int], ...] = SIZES) -> Path:
    """Writes `count` photographs into FOLDER/CLASS/, in ten classes, unless they exist. Returns the folder.

    sizes: width and height in pixels, in turn.
    """
    from PIL import Image

    if len(list(folder.glob("*/*.jpg"))) == count:
        return folder
    sources = originals()
    for number in range(count):
        random = np.random.Generator(np.random.Philox(number))
        source, (width, height) = sources[number % len(sources)], sizes[number % len(sizes)]
        photo = random_part(random, source, width, height, 0.5)
        if random.random() < 0.5:
            photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        path = folder / f"class {number % CLASSES}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.save(path, "JPEG", quality=QUALITY)
    return folder


def random_part(random, photo, width: int, height: int, least: float):
    """Returns a random part of a photograph in this size. least: its side, as a fraction of the largest possible."""
    from PIL import Image

    scale = random.uniform(least, 1.0) * min(photo.width / width, photo.height / height)
    left = random.uniform(0, photo.width - width * scale)
    top = random.uniform(0, photo.height - height * scale)
    box = left, top, left + width * scale, top + height * scale
    return photo.resize((width, height), Image.Resampling.BICUBIC, box)


def originals() -> list:
    """Returns the photographs in the packages as Pillow images. It downloads none."""
    import skimage
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(image) for image in load_sample_images().images]
    for name in NAMES:
        for path in sorted(Path(skimage.__file__).parent.glob(f"data/{name}.*")):
            if path.suffix in (".png", ".jpg"):
                photos.append(Image.open(path).convert("RGB"))
    return photos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--size", type=lambda text: tuple(map(int, text.split("x"))), help="WIDTHxHEIGHT")
    options = parser.parse_args()
    print(make(options.folder, options.count, (options.size,) if options.size else SIZES))


if __name__ == "__main__":
    main()
