"""Source `digits`: scikit-learn's 1,797 handwritten digits, real data that ships with a library.

The images are the test set of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998, UCI): 8x8 pixels
of 0 to 16.
"""
import numpy as np

from data.sources.source import Source, encode

VERSION = 2  # change it whenever the bytes change, so that no cache goes stale
SIZE = 32
VALIDATION_EVERY = 5  # samples 0, 5, 10, ... are validation: 360 of 1,797


def digits() -> Source:
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = data.images * (255 / 16), data.target
    validation = np.arange(len(labels)) % VALIDATION_EVERY == 0

    def split(chosen):
        return lambda: ((encode(enlarge(image)), int(label))
                        for image, label in zip(images[chosen], labels[chosen], strict=True))

    return Source(tuple(map(str, data.target_names)), {"train": split(~validation), "validation": split(validation)},
                  {"train": int((~validation).sum()), "validation": int(validation.sum())},
                  mean=(round(float(images[~validation].mean()), 3),) * 3,
                  std=(round(float(images[~validation].std()), 3),) * 3)


def enlarge(image: np.ndarray) -> np.ndarray:
    """Enlarges an 8x8 image of 0 to 255 to 32x32 (bicubic)."""
    from PIL import Image

    small = Image.fromarray(np.round(image).astype(np.uint8))
    return np.asarray(small.resize((SIZE, SIZE), Image.Resampling.BICUBIC))
