"""Photographic JPEGs for benchmarks: crops of the photographs that scikit-learn and scikit-image ship.

The same packages always give the same files. Size and quality are those of ImageNet's training images: about 500x375
pixels and 45 KB.
"""
from pathlib import Path

import numpy as np

NAMES = ("astronaut", "chelsea", "coffee", "rocket", "retina", "hubble_deep_field", "motorcycle_left")
SIZES = ((500, 375), (375, 500), (500, 333), (500, 400))
QUALITY = 90
CLASSES = 10


def make(folder: Path, count: int) -> Path:
    """Writes `count` photographs into FOLDER/CLASS/, in ten classes, unless they exist. Returns the folder."""
    from PIL import Image

    if len(list(folder.glob("*/*.jpg"))) == count:
        return folder
    sources = originals()
    for number in range(count):
        random = np.random.Generator(np.random.Philox(number))
        source, (width, height) = sources[number % len(sources)], SIZES[number % len(SIZES)]
        scale = random.uniform(0.5, 1.0) * min(source.width / width, source.height / height)
        crop_width, crop_height = width * scale, height * scale
        left = random.uniform(0, source.width - crop_width)
        top = random.uniform(0, source.height - crop_height)
        photo = source.resize((width, height), Image.Resampling.BICUBIC,
                              (left, top, left + crop_width, top + crop_height))
        if random.random() < 0.5:
            photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        path = folder / f"class {number % CLASSES}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.save(path, "JPEG", quality=QUALITY)
    return folder


def originals() -> list:
    """Returns the photographs in the packages as Pillow images. It downloads none."""
    import skimage
    from PIL import Image
    from sklearn.datasets import load_sample_images

    found = [Image.fromarray(image) for image in load_sample_images().images]
    for name in NAMES:
        for path in sorted(Path(skimage.__file__).parent.glob(f"data/{name}.*")):
            if path.suffix in (".png", ".jpg"):
                found.append(Image.open(path).convert("RGB"))
    return found
