"""Sources `fashion` and `fashion_holdout`: Fashion-MNIST (Xiao et al., arXiv:1708.07747), where it is installed.

70,000 grey photographs of clothes, 28x28 pixels, 10 classes, MIT licence. `fashion` has the 60,000 training and 10,000
test images. `fashion_holdout` is for choosing flags: its validation images are the last twelfth of the training images
(5,000), which it does not train on, and it has no test images.
"""
from pathlib import Path

from common.errors import UserError
from data.sources.idx import is_idx, read
from data.sources.source import Source, held_out, of_arrays

VERSION = 1  # change it whenever the bytes change, so that no cache goes stale
PACKAGE = "dataset-fashion-mnist"
FOLDERS = ("~/.keras/datasets/fashion-mnist", "/usr/share/datasets/fashion-mnist")  # Keras's, Debian's
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
HELD_OUT = 12  # one of these parts of the training images


def fashion() -> Source:
    return of_arrays(_read(), CLASSES)


def fashion_holdout() -> Source:
    return of_arrays(held_out(_read(), HELD_OUT), CLASSES)


def _read() -> dict:
    folder = next((found for name in FOLDERS if is_idx(found := Path(name).expanduser())), None)
    if not folder:
        raise UserError(f"fashion: Fashion-MNIST is not installed; run `apt-get install {PACKAGE}`, or copy its four "
                        f"files to {FOLDERS[0]}, where Keras keeps them, too")
    splits = read(folder)
    if max(int(labels.max()) for _, labels in splits.values()) >= len(CLASSES):
        raise UserError(f"fashion: {folder} is another dataset: it has more than {len(CLASSES)} classes")
    return splits
