"""What an evaluation finds for each validation sample, and predictions.csv, which says so."""
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from common.errors import shown
from common.files import as_csv


class Outcomes(NamedTuple):
    """The outcomes of the validation samples, float32 (samples,) each, in the order of the dataset.

    They are those of the moving average of the weights if there is one.
    """

    labels: Any
    predicted: Any  # most probable classes
    losses: Any  # cross-entropies in nats
    ranks: Any  # as training.losses.label_ranks has them
    probabilities: Any  # of the predicted classes

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The labels and the predicted classes, int64 (samples,)."""
        return self.labels.astype(np.int64), self.predicted.astype(np.int64)

    @property
    def guesses(self) -> tuple[np.ndarray, np.ndarray]:
        """The predicted classes and their probabilities, float32 (samples, 1) each, as EvaluationResult.guesses."""
        return np.asarray(self.predicted)[:, None], np.asarray(self.probabilities)[:, None]


def heads(best: int) -> list[str]:
    """Returns the heads of the columns of the `best` most probable classes in predictions.csv."""
    return [f"{what}_{rank}" for rank in range(1, best + 1) for what in ("class", "probability")]


def predictions_csv(outcomes: Outcomes, guesses: tuple[np.ndarray, np.ndarray], names: Sequence[str],
                    classes: Sequence[str]) -> str:
    """Returns the content of predictions.csv: file, label, predicted class and the most probable classes of each image.

    guesses: as EvaluationResult.guesses. names: of the images. classes: names in label order.
    """
    classes, rows = [shown(name) for name in classes], [["file", "label", "predicted", *heads(guesses[0].shape[1])]]
    for name, label, predicted, *guess in zip(names, *outcomes.pairs, *guesses, strict=True):
        cells = [cell for number, probability in zip(*guess, strict=True)
                 for cell in (classes[int(number)], f"{probability:.6f}")]
        rows.append([shown(name), classes[label], classes[predicted], *cells])
    return as_csv(rows)
