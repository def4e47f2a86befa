"""The eigenvalues and eigenvectors with which model_zoo/whitened_convnet.py whitens patches of 2x2 pixels.

    uv run python -m benchmarks.whitening DATA

DATA is a dataset as --data_dir takes it. The network's numbers are those of CIFAR-10.
"""
import argparse
import io

import numpy as np
from PIL import Image

from data.dataset import Dataset
from data.named import open_named

BATCH = 1000  # images


def covariance(dataset: Dataset) -> np.ndarray:
    """Returns the covariance of all 2x2 patches of the training images, float64 (12, 12), by row, column and channel.

    The pixels are normalized with the mean and the standard deviation of the dataset.
    """
    sums, squares, count = np.zeros(12), np.zeros((12, 12)), 0
    for start in range(0, dataset.train.samples, BATCH):
        records = dataset.train.records(np.arange(start, min(start + BATCH, dataset.train.samples)))
        images = (np.stack([np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image, _ in records])
                  - np.array(dataset.mean)) / np.array(dataset.std)
        corners = images[:, :-1, :-1], images[:, :-1, 1:], images[:, 1:, :-1], images[:, 1:, 1:]
        patches = np.concatenate(corners, axis=-1).reshape(-1, 12)
        sums, squares, count = sums + patches.sum(axis=0), squares + patches.T @ patches, count + len(patches)
    return squares / count - np.outer(sums, sums) / count**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    values, vectors = np.linalg.eigh(covariance(open_named(parser.parse_args().data)))
    vectors *= np.sign(vectors[np.abs(vectors).argmax(axis=0), range(12)])  # the largest component is positive
    print(f"EIGENVALUES = {', '.join(f'{value:.5g}' for value in values)}", "EIGENVECTORS = (", sep="\n")
    for vector in vectors.T:
        print(f"    ({', '.join(f'{component:.4f}' for component in vector)}),")
    print(")")


if __name__ == "__main__":
    main()
