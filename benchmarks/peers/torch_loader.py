"""PyTorch's DataLoader with Pillow: a port of torchvision's RandomResizedCrop, horizontal flip, uint8 tensors.

    python -m benchmarks.peers.torch_loader FOLDER IMAGE_SIZE BATCH WORKERS

FOLDER holds one folder of images per class. Needs torch, Pillow and NumPy, but nothing of bigbatch.
"""
import itertools
import math
import random
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.peers.turns import serve

AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)


class Photos(torch.utils.data.Dataset):
    def __init__(self, folder, image_size):
        classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
        self._files = [(str(file), label) for label, path in enumerate(classes) for file in sorted(path.iterdir())]
        self._size = image_size

    def __len__(self):
        return len(self._files)

    def __getitem__(self, number):
        file, label = self._files[number]
        with Image.open(file) as image:
            image = image.convert("RGB")
        image = image.crop(crop_box(*image.size)).resize((self._size, self._size), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)), label


def crop_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Returns a crop like torchvision's RandomResizedCrop.get_params: ten tries, then the centre."""
    for _ in range(10):
        area = width * height * random.uniform(*AREA)
        aspect = math.exp(random.uniform(*map(math.log, ASPECT)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    w, h = min(width, round(height * ASPECT[1])), min(height, round(width / ASPECT[0]))
    return (width - w) // 2, (height - h) // 2, (width + w) // 2, (height + h) // 2


class Endless(torch.utils.data.Sampler):
    """Samples one permutation after another, so that the workers never restart."""

    def __init__(self, count):
        self._count = count

    def __iter__(self):
        return itertools.chain.from_iterable(torch.randperm(self._count).tolist() for _ in itertools.count())


def main(folder: str, image_size: str, batch_size: str, workers: str) -> None:
    photos = Photos(folder, int(image_size))
    loader = torch.utils.data.DataLoader(photos, batch_size=int(batch_size), sampler=Endless(len(photos)),
                                         num_workers=int(workers))
    serve(iter(loader).__next__, int(batch_size))


if __name__ == "__main__":
    main(*sys.argv[1:])
