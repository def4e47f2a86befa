"""Divergence: a loss or a gradient that is infinite or NaN, or a loss that has exploded."""
import math

import numpy as np

SAME_BITS = "with --xla or --share_orthogonalization=false, equal weights need equal processors"
EXPLOSION = 1000  # times the loss of guessing; training has recovered from spikes of 100 times


class Diverged(Exception):
    """Raised when training has diverged at a step. Later steps may have been launched since."""

    advice = "try a lower --learning_rate or a longer --warmup_epochs"
    is_of_samples = True  # whether the samples of the last steps may be the cause, so that a rollback skips them
    is_below_expected = False  # whether training has not diverged, but fallen behind, which no rollback cures

    def __init__(self, reason: str, step: int, epoch: float, learning_rate: float):
        self.reason = reason
        self.step = step
        self.epoch = epoch
        super().__init__(f"training diverged at step {step} (epoch {epoch:.3f}, learning rate {learning_rate:.4g}): "
                         f"{reason}")


class WeightsDiffer(Diverged):
    """Raised on all workers when their states differ: weights, momentum, or anything else in a checkpoint.

    processors: those of the workers, if they differ.
    """

    advice = "test the memory and the GPU of that host, and continue without it"
    is_of_samples = False

    def __init__(self, reason: str, step: int, epoch: float, processors: str | None = None):
        if processors:
            self.advice = (f"the workers have different processors ({processors}); {SAME_BITS}; if they are equal, "
                           f"{self.advice}")
        self.step = step
        self.epoch = epoch
        Exception.__init__(self, f"after step {step} (epoch {epoch:.3f}), {reason}")


class BelowExpected(Diverged):
    """Raised on all workers after an evaluation that lies too far below --expect."""

    advice = "without --stop_below_expected, the same command continues"
    is_of_samples = False
    is_below_expected = True

    def __init__(self, step: int, epoch: float, top1: float, expected: float, path: str):
        self.step = step
        self.epoch = epoch
        Exception.__init__(self, f"after epoch {epoch:g}, top-1 {top1:.2%} is {100 * (expected - top1):.2f} points "
                                 f"below the {expected:.2%} of --expect={path}")


def divergence_reason(loss: float, norms: np.ndarray, names: list[str], guessing: float,
                      loss_scaling: bool) -> str | None:
    """Returns what is wrong after a step, or None.

    norms: norms of the averaged gradients, float (variables,), in the order of the forward pass. names: of the
    variables. The backward pass runs in reverse order, so the last of the gradients that are not finite went first.
    guessing: the loss of guessing, of which EXPLOSION times as much is too large. loss_scaling: if true, gradients that
    are not finite are left to the loss scale, as long as the loss is finite.
    """
    broken = np.flatnonzero(~np.isfinite(norms))
    if not math.isfinite(loss) or (len(broken) and not loss_scaling):
        first = f"; the first gradient that is not finite is that of {names[broken[-1]]}" if len(broken) else ""
        return f"the loss is {loss:.4g}{first}"
    if loss > EXPLOSION * guessing:
        largest = int(np.argmax(norms))
        return (f"the loss is {loss:.4g}, over {EXPLOSION} times that of guessing; the largest gradient is that of "
                f"{names[largest]}, with norm {norms[largest]:.3g}")
    return None
