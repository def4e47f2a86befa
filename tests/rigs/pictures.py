"""Small pictures in folders for the tests of prepare, awkward ones among them, and ways to look at what came out."""
import hashlib
import io
import os
from pathlib import Path

import numpy as np
import pillow_heif
from PIL import Image

from data import prepare
from data.dataset import open_dataset

pillow_heif.register_heif_opener()
CLASSES = ("a b", "dog", "épée")  # with a space, plain, beyond ASCII


def picture(number: int, size=(40, 30)) -> Image.Image:
    """A smooth picture, different for each number."""
    random = np.random.Generator(np.random.Philox(number))
    small = Image.fromarray(random.integers(40, 216, (3, 4, 3), dtype=np.uint8))
    return small.resize(size, Image.Resampling.BICUBIC)


def encode(image, kind="JPEG", **options) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def fill(folder: Path, count: int, first: int = 0, classes=CLASSES, size=(40, 30)) -> Path:
    """`count` JPEGs a class, each different from all others."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for image in range(count):
            unique = first + number * count + image
            (folder / name / f"{image} ü.jpg").write_bytes(encode(picture(unique, size)))
    return folder


def awkward(folder: Path) -> Path:
    """A source with everything that goes wrong in collections."""
    fill(folder / "train", 12)
    fill(folder / "val", 3, first=1000)
    (folder / "train" / "empty").mkdir()
    dog = folder / "train" / "dog"
    (dog / "cmyk.jpg").write_bytes(encode(picture(2001).convert("CMYK")))
    (dog / "png.JPEG").write_bytes(encode(picture(2002), "PNG"))
    (dog / "alpha.png").write_bytes(encode(picture(2003).convert("RGBA"), "PNG"))
    (dog / "animated.gif").write_bytes(encode(picture(2009).convert("L"), "GIF", save_all=True,
                                           append_images=[picture(2010).convert("L")]))
    (dog / "phone.HEIC").write_bytes(encode(picture(2011), "HEIF", quality=95))
    (dog / "sound.png").write_bytes(encode(picture(2004), "PNG"))
    (dog / "grey.jpg").write_bytes(encode(picture(2005).convert("L")))
    (dog / "deeper").mkdir()
    (dog / "deeper" / "in a folder.jpg").write_bytes(encode(picture(2006)))
    Path(os.fsdecode(os.fsencode(dog) + b"/\xff\xfe.jpg")).write_bytes(encode(picture(2007)))
    (dog / "truncated.jpg").write_bytes(encode(picture(2008))[:-60])
    (dog / "text.jpg").write_text("not an image")
    (dog / "unreadable.jpg").symlink_to("/proc/self/mem")  # an input/output error, to root as well
    (dog / ".hidden.jpg").write_text("not an image")
    return folder


CONVERTED = {"dog/cmyk.jpg", "dog/animated.gif", "dog/phone.HEIC"}
REJECTED = {"train/dog/truncated.jpg", "train/dog/text.jpg", "train/dog/unreadable.jpg"}


def command(*flags) -> int:
    """The prepare command, in this process."""
    return prepare.main(["prepare", *map(str, flags)])


def contents(folder: Path) -> dict[str, str]:
    """Name -> digest of every file, those in folders, too."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def stored(folder: Path) -> dict[str, list[tuple[bytes, str]]]:
    """split -> (encoded image, class) pairs of a prepared dataset, in the order of its files."""
    dataset = open_dataset(folder)
    pairs = {}
    for name, split in (("train", dataset.train), ("validation", dataset.validation)):
        pairs[name] = [(bytes(image), dataset.classes[label - dataset.first_label])
                       for path, entries in zip(split.paths, split.entries, strict=True)
                       for image, label in split.kind.records(path, entries, np.arange(len(entries)))]
    return pairs


def originals(folder: Path) -> dict[bytes, str]:
    """Content -> name of every file under a split's folder that can be read; no two are alike."""
    paths = [path for path in folder.rglob("*")
             if path.is_file() and not path.is_symlink() and not path.name.startswith(".")]
    found = {path.read_bytes(): str(path.relative_to(folder)) for path in paths}
    assert len(found) == len(paths)
    return found
