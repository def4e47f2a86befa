"""The built-in dataset: scikit-learn's 1,797 handwritten digits, real data that ships with a library.

The test set of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998, UCI): 8x8 pixels, 0 to 16.
"""
import io
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from data import tfrecord
from data.dataset import Dataset, Split, describe

FOLDER = "digits-1"  # a new number whenever the bytes below change, so that no cache goes stale
SIZE = 32
VALIDATION_EVERY = 5  # samples 0, 5, 10, ... are validation: 360 of 1,797


def digits() -> Path:
    """The folder with the dataset, made in the cache if it is not there; safe when several workers do it at once.

    Each worker writes a folder of its own and renames it into place; the first wins, the others drop theirs.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bigbatch"
    folder = cache / FOLDER
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{FOLDER}.", dir=cache))
        try:
            write_digits(scratch)
            scratch.chmod(0o755)
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def write_digits(folder: Path) -> None:
    """Writes the shards, their indexes and, last, dataset.json."""
    from sklearn.datasets import load_digits

    source = load_digits()
    images, labels = source.images, source.target
    validation = np.arange(len(labels)) % VALIDATION_EVERY == 0
    splits = {}
    for name, chosen in (("train", ~validation), ("validation", validation)):
        path = folder / f"{name}-00000-of-00001.tfrecord"
        count = tfrecord.write_shard(path, zip(map(encode, images[chosen]), map(int, labels[chosen]), strict=True))
        splits[name] = Split((path,), (count,))
    grey = images[~validation] * (255 / 16)
    dataset = Dataset(folder, "tfrecord", tuple(map(str, source.target_names)), **splits,
                      mean=(round(float(grey.mean()), 3),) * 3, std=(round(float(grey.std()), 3),) * 3)
    (folder / "dataset.json").write_text(json.dumps(describe(dataset), indent=1) + "\n")


def encode(image: np.ndarray) -> bytes:
    """An 8x8 image of 0 to 16, enlarged to 32x32 (bicubic), as grey JPEG."""
    from PIL import Image

    small = Image.fromarray(np.round(image * (255 / 16)).astype(np.uint8))
    encoded = io.BytesIO()
    small.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=95)
    return encoded.getvalue()
