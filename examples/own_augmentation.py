"""An augmentation of one's own: random crops of at least half of an image, as they are or mirrored.

    uv run train.py --data_dir=DATA --augmentation=examples.own_augmentation:LARGE_CROPS
"""
from data.augmentation import Augmentation

LARGE_CROPS = Augmentation(area=(0.5, 1.0), aspect=(0.9, 1.1), flip=True, enlarge=256 / 224)
