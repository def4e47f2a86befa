"""Divergence: a loss or a gradient that is no longer a number, or a loss that has exploded."""
import math

import numpy as np

EXPLOSION = 1000  # times the loss of a network that knows nothing, log(classes); spikes of 100 times were survived


class Diverged(Exception):
    """What went wrong at a step, whatever was launched since."""

    def __init__(self, reason: str, step: int, epoch: float, learning_rate: float):
        self.step = step
        super().__init__(f"training diverged at step {step} (epoch {epoch:.3f}, learning rate {learning_rate:.4g}): "
                         f"{reason}")


def divergence_reason(loss: float, norms: np.ndarray, names: list[str], classes: int,
                      loss_scaling: bool) -> str | None:
    """What is wrong after a step, or None.

    norms: of each averaged gradient, float (variables,), in the order of the forward pass; names: of the variables.
    The backward pass goes the other way: of the gradients that are not finite, the last listed went first.
    loss_scaling: gradients that are not finite are the loss scale's affair, as long as the loss is.
    """
    broken = np.flatnonzero(~np.isfinite(norms))
    if not math.isfinite(loss) or (len(broken) and not loss_scaling):
        first = f"; of the gradients, that of {names[broken[-1]]} went first" if len(broken) else ""
        return f"the loss is {loss:.4g}{first}"
    if loss > EXPLOSION * math.log(max(classes, 2)):
        largest = int(np.argmax(norms))
        return (f"the loss is {loss:.4g}, {EXPLOSION} times that of guessing; the largest gradient is that of "
                f"{names[largest]}, of norm {norms[largest]:.3g}")
    return None
