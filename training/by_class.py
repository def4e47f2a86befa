"""How well each class is recognized: recall, precision and F1, and their means over the classes."""
from collections.abc import Sequence

import numpy as np

from common import files, metric
from common.accuracy import interval

WEAKEST = 3  # weakest classes in summary.json


def by_class(labels, predicted, classes: Sequence[str], counts=None) -> list[dict]:
    """Returns a row for each class, in label order.

        class, images (of this class), predicted (images predicted as this class), correct (images that are both)
        recall      correct / images. recall_low, recall_high: its 95 % interval (Wilson's)
        precision   correct / predicted. precision_low, precision_high: its 95 % interval
        f1          harmonic mean of recall and precision: 2 correct / (images + predicted)

    A fraction is None where it would be 0 / 0, and a class without images has none at all.

    labels, predicted: (samples,). counts: how many samples each of them stands for. Default: 1.
    """
    labels, predicted = (np.asarray(column).astype(np.int64) for column in (labels, predicted))
    counts = np.ones(len(labels)) if counts is None else counts
    of_label, of_prediction, correct = (
        np.bincount(column, weights, len(classes)).astype(np.int64).tolist()
        for column, weights in ((labels, counts), (predicted, counts), (labels, counts * (labels == predicted))))
    return [_row(*figures) for figures in zip(classes, of_label, of_prediction, correct, strict=True)]


def _row(name: str, images: int, predicted: int, correct: int) -> dict:
    recall, recall_low, recall_high = _fraction(correct, images)
    precision, precision_low, precision_high = _fraction(correct, images and predicted)
    return {"class": name, "images": images, "predicted": predicted, "correct": correct,
            "recall": recall, "recall_low": recall_low, "recall_high": recall_high,
            "precision": precision, "precision_low": precision_low, "precision_high": precision_high,
            "f1": 2 * correct / (images + predicted) if images else None}


def _fraction(part: int, whole: int) -> tuple[float, float, float] | tuple[None, None, None]:
    """Returns a fraction and its interval."""
    return (part / whole, *interval(part / whole, whole)) if whole else (None, None, None)


def averages(rows: list[dict]) -> dict[str, float]:
    """Returns the means over the classes with images, for summary.json. rows: of by_class."""
    judged = [row for row in rows if row["images"]]
    return {metric.BALANCED_TOP1: float(np.mean([row["recall"] for row in judged])),
            metric.MACRO_F1: float(np.mean([row["f1"] for row in judged]))}


def effective_samples(rows: list[dict]) -> float:
    """Returns the number of images whose top-1 would be as uncertain as the mean recall over the classes.

    For k classes with n_1, n_2, ... images, and the same recall p of each, the variance of that mean is
    p (1 - p) (1 / n_1 + 1 / n_2 + ...) / k**2. rows: of by_class.
    """
    images = np.array([row["images"] for row in rows if row["images"]])
    return float(len(images) ** 2 / np.sum(1 / images))


def weakest_first(rows: list[dict]) -> list[dict]:
    """Returns rows of by_class by recall, then F1, then most images. Classes without images are last."""
    return sorted(rows, key=lambda row: (not row["images"], row["recall"], row["f1"], -row["images"]))


def weakest(rows: list[dict]) -> list[dict]:
    """Returns the weakest of the classes that have errors, at most WEAKEST, for summary.json."""
    return [{name: row[name] for name in ("class", "images", "correct", "recall")}
            for row in weakest_first(rows)[:WEAKEST] if row["images"] and row["correct"] < row["images"]]


def as_csv(rows: list[dict]) -> bytes:
    """Returns the content of classes.csv, UTF-8. None is an empty field."""
    return files.as_csv([rows[0], *(row.values() for row in rows)]).encode(errors="backslashreplace")
