"""Recall, precision and F1 of each class, against scikit-learn and SciPy."""
import csv
import io
from collections import Counter

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import balanced_accuracy_score, f1_score, precision_recall_fscore_support

from training.by_class import as_csv, averages, by_class, effective_samples, weakest, weakest_first

CLASSES = tuple(f"class {label}" for label in range(7))


def made_up(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of few and of many images. Class 2 has none but is predicted, and class 4 is never predicted."""
    random = np.random.default_rng(seed)
    labels = random.choice([0, 1, 3, 4, 5, 6], 300, p=[0.5, 0.2, 0.1, 0.1, 0.07, 0.03])
    predicted = np.where(random.random(300) < 0.3, random.integers(0, 7, 300), labels)
    predicted[predicted == 4] = 2
    return labels.astype(np.float32), predicted.astype(np.float32)  # as in the outcomes of an evaluation


@pytest.mark.parametrize("seed", range(5))
def test_the_figures_are_scikit_learns(seed):
    labels, predicted = made_up(seed)
    rows = by_class(labels, predicted, CLASSES)
    expected = precision_recall_fscore_support(labels, predicted, labels=range(7), zero_division=np.nan)
    for row, precision, recall, f1, images in zip(rows, *expected, strict=True):
        assert row["images"] == images
        if images:
            found = [np.nan if row[name] is None else row[name] for name in ("precision", "recall", "f1")]
            assert found == pytest.approx([precision, recall, f1], abs=1e-9, nan_ok=True)
    assert rows[4]["precision"] is None and rows[4]["f1"] == 0
    present = np.unique(labels)
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        balanced = balanced_accuracy_score(labels, predicted)
    assert averages(rows) == {
        "balanced_top1": pytest.approx(balanced, abs=1e-9),
        "macro_f1": pytest.approx(f1_score(labels, predicted, labels=present, average="macro"), abs=1e-9)}


def test_the_intervals_are_scipys():
    for row in by_class(*made_up(0), CLASSES):
        for name, of in (("recall", row["images"]), ("precision", row["predicted"])):
            if row[name] is not None:
                wilson = binomtest(row["correct"], of).proportion_ci(0.95, "wilson")
                assert (row[f"{name}_low"], row[f"{name}_high"]) == pytest.approx((wilson.low, wilson.high), abs=1e-6)


@pytest.mark.parametrize("images", [1, 4, 10, 50, 125, 360, 500])
def test_an_interval_holds_its_accuracy_and_ends_at_0_and_1(images):
    """By rounding, 4 of 4 had 0.9999999999999999, and 0 of 125 had 2e-18."""
    all_, none = by_class([0] * images, [0] * images, ["a"]) + by_class([0] * images, [1] * images, ["a", "b"])[:1]
    assert (all_["recall_high"], all_["precision_high"], none["recall_low"]) == (1.0, 1.0, 0.0)
    assert "0.99999999" not in as_csv([all_]).decode()


def test_the_mean_recall_is_as_uncertain_as_the_top_1_of_so_many_images():
    """Against the variance of drawn means: of 5, 50 and 500 images, of which 0.8 are recognized."""
    images, random = [5, 50, 500], np.random.default_rng(0)
    drawn = np.mean([random.binomial(count, 0.8, 100_000) / count for count in images], axis=0)
    rows = by_class(np.repeat([0, 1, 2], images), np.repeat([0, 1, 2], images), CLASSES)  # the other classes have none
    assert effective_samples(rows) == pytest.approx(0.8 * 0.2 / drawn.var(), rel=0.03)
    equal = by_class([0, 0, 1, 1, 2, 2], [0, 0, 1, 0, 2, 2], CLASSES)
    assert effective_samples(equal) == pytest.approx(6)


def test_a_confusion_matrix_gives_the_same_rows_as_the_samples():
    labels, predicted = made_up(1)
    pairs = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))
    columns = zip(*((label, other, count) for (label, other), count in pairs.items()), strict=True)
    label, other, counts = columns
    assert by_class(label, other, CLASSES, counts) == by_class(labels, predicted, CLASSES)


def test_the_weakest_classes_have_errors_and_the_lowest_recall():
    labels, predicted = [0, 0, 1, 2, 2, 3, 3, 3, 5], [0, 1, 0, 2, 0, 3, 3, 3, 5]
    rows = by_class(labels, predicted, CLASSES)
    assert [row["class"][-1] for row in weakest_first(rows)] == ["1", "0", "2", "3", "5", "4", "6"]
    assert weakest(rows) == [{"class": "class 1", "images": 1, "correct": 0, "recall": 0.0},
                             {"class": "class 0", "images": 2, "correct": 1, "recall": 0.5},
                             {"class": "class 2", "images": 2, "correct": 1, "recall": 0.5}]
    assert weakest(by_class([0, 1], [0, 1], CLASSES)) == []


def test_the_table_can_be_read_back_whatever_a_class_is_called():
    names = ('a "big", red; one', "Übergröße\nsecond line", "=1+1", "empty", "\udcff", "5", "6")
    labels, predicted = [0, 1, 2, 2, 4], [1, 1, 2, 2, 4]
    rows = by_class(labels, predicted, names)
    read = list(csv.DictReader(io.StringIO(as_csv(rows).decode("utf-8"), newline="")))
    assert [one["class"] for one in read] == [*names[:4], "\\udcff", "5", "6"]
    for row, one in zip(rows, read, strict=True):
        for name in row.keys() - {"class"}:
            assert (one[name] == "") if row[name] is None else (float(one[name]) == row[name])
    assert [read[3][name] for name in read[3] if name != "class"] == ["0"] * 3 + [""] * 7
