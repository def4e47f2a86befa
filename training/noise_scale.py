"""The gradient noise scale (arXiv:1812.06162): the batch size beyond which more samples per update save few updates.

With G the true gradient and S the covariance of one sample's gradient, it is tr(S) / |G|^2 (section 2.2). Gradients of
two batch sizes give unbiased estimates of both (appendix A.1): those of micro-batches of b samples, and their mean over
the global batch of B samples.

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)          tr(S) = (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)

Each is averaged over updates before one is divided by the other. A mean would be that of the few updates with by far
the largest gradients, such as the first, so it is the median over some runs of consecutive updates.
"""
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

RUNS = 8  # of consecutive updates
FEWEST = 2  # updates in a run
CERTAIN = 2.0  # standard errors by which |G|^2 has to exceed 0
DEVIATION = 1.2533 * 1.4826  # standard error of a median, times sqrt(values), over the median absolute deviation
SUMS = 64  # of consecutive updates that are kept, at most; the more, the more alike are the runs


class NoiseScale:
    """The estimates since the last certain result.

    Consecutive updates are added up once there are many, so the sums have a fixed size, which a checkpoint can hold.

    variable: the sums, for checkpoints, float64 (SUMS, 2, variables + 1): |G|^2 and tr(S) of each variable, and the
    number of updates. `write` copies the sums there, and `read` takes them from there.
    """

    def __init__(self, variables: int):
        self._sums = np.zeros((SUMS, 2, variables + 1))
        self.variable = tf.Variable(self._sums, trainable=False, name="noise_scale")

    def write(self) -> None:
        self.variable.assign(self._sums)

    def read(self) -> None:
        self._sums = self.variable.numpy()

    def add(self, batch_size: int, micro_batch_size: int, norms: np.ndarray, squares: np.ndarray) -> None:
        """Adds an update. An overflow is left out.

        norms: of the gradient of each variable over the global batch, (variables,). squares: mean over the
        micro-batches of the squared norm of the gradient, (variables,).
        """
        large = np.square(norms, dtype=np.float64)
        small = squares.astype(np.float64)
        gradient = (batch_size * large - micro_batch_size * small) / (batch_size - micro_batch_size)
        variance = (small - large) / (1 / micro_batch_size - 1 / batch_size)
        if not (np.isfinite(gradient).all() and np.isfinite(variance).all()):
            return
        counts = self._sums[:, 0, -1]
        if counts[-1] == counts[0] > 0:  # all are full: each pair becomes one
            self._sums = np.concatenate([self._sums[::2] + self._sums[1::2], np.zeros_like(self._sums[::2])])
            counts = self._sums[:, 0, -1]
        open_ = np.argmax(counts < max(1, counts[0]))
        self._sums[open_] += np.pad([gradient, variance], [(0, 0), (0, 1)], constant_values=1)

    def collect(self, names: Sequence[str], ratios: Sequence[float]) -> dict:
        """Returns the result, or an empty dict if no update was added. If it is certain, the estimates start anew.

        names: of the variables. ratios: by which the optimizer multiplies the gradient of each, such as trust ratios.
        The result has `updates` (number of estimates), `gradient_squared`, its standard error and `variance`, of the
        multiplied gradient, `noise_scale` in samples, which is None if |G|^2 drowns in the noise, and that of the
        `layers` by name.
        """
        used = self._sums[self._sums[:, 0, -1] > 0]
        count = int(used[:, 0, -1].sum())
        if not count:
            return {}
        runs = [run.sum(axis=0) for run in np.array_split(used, min(RUNS, max(1, count // FEWEST)))]
        means = np.stack([run[:, :-1] / run[:, -1:] for run in runs])  # (runs, 2, variables)
        totals = (means * np.square(ratios)).sum(axis=2)
        gradient, variance = np.median(totals, axis=0).tolist()
        error = DEVIATION * float(np.median(np.abs(totals[:, 0] - gradient))) / len(runs) ** 0.5
        is_certain = len(runs) == RUNS and gradient > CERTAIN * error
        if is_certain:
            self._sums = np.zeros_like(self._sums)
        layers = {name: float(s / g) if g > 0 and s > 0 else None
                  for name, (g, s) in zip(names, np.median(means, axis=0).T, strict=True)}
        return {"updates": count, "gradient_squared": gradient, "gradient_squared_error": error, "variance": variance,
                "noise_scale": max(0.0, variance / gradient) if is_certain else None, "layers": layers}
