"""What an evaluation finds for each validation sample."""
from typing import Any, NamedTuple

import numpy as np


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
