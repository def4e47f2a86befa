"""The update of the weights: gradients are averaged over the workers, unscaled, and applied.

A loss scale skips the update if a gradient is not finite, on all workers.
"""
import tensorflow as tf

from distributed.exchange import GradientExchange
from distributed.fixed_point import FLOAT32, FixedPoint, Float32
from distributed.optimizer import LossScaleOptimizer, has_dynamic_scale, inner
from optim.lars import SGD
from optim.scaled import Scaled


def average(exchange: GradientExchange, optimizer, gradients, variables, count: int,
            form: Float32 | FixedPoint = FLOAT32) -> tuple[list[Scaled], tf.Tensor]:
    """Sums the gradients over the workers in one exchange, divides by `count` and unscales. Returns also their norms.

    gradients: sums over this worker's micro-batches, as `form` represents them. count: number of micro-batches that the
    sums over all workers contain. norms: float32 (gradients,). No gradient is multiplied: the count, the loss scale and
    the scales of compressed gradients are one factor of each. An overflow on one worker makes the sum, and so the norm,
    infinite or NaN on all of them.
    """
    totals, factors, norms = exchange.sums(gradients, variables, count, inner(optimizer).wire_scales, form)
    if isinstance(optimizer, LossScaleOptimizer):
        factors /= optimizer.loss_scale
    norms *= factors
    parts = zip(totals, tf.unstack(factors, len(totals)), tf.unstack(norms, len(totals)), strict=True)
    return [Scaled(*part) for part in parts], norms


def clipped(gradients: list[Scaled], norms: tf.Tensor, clip_norm: float) -> list[Scaled]:
    """Returns the gradients, scaled so that the L2 norm of all of them together is at most clip_norm (arXiv:1211.5063).

    norms: of the gradients, float32 (gradients,).
    """
    share = tf.minimum(1.0, clip_norm / tf.norm(norms))
    return [Scaled(gradient.tensor, gradient.factor * share, gradient.norm * share) for gradient in gradients]


def apply(optimizer, gradients: list[Scaled], norms: tf.Tensor, variables, clip_norm: float = 0.0, xla: bool = False
          ) -> bool | tf.Tensor:
    """Updates the variables, or skips the update and lowers the loss scale if a norm is not finite.

    Returns whether it has updated them. gradients, norms: of `average`. clip_norm: see `clipped`; 0: they are not
    clipped. xla: whether XLA compiles the update as one unit. Keras's LossScaleOptimizer would test each element of
    each gradient, and count a skipped update as one of the optimizer's `iterations`: Adam and LAMB would then divide
    their moments by a correction for more updates than these contain. An optimizer that is not ours gets tensors.
    """
    if clip_norm:
        gradients = clipped(gradients, norms, clip_norm)
    wrapped = inner(optimizer)  # in Horovod's DistributedOptimizer, whose apply_gradients leaves the exchange to us

    def update():
        ours = gradients if isinstance(wrapped, SGD) else [gradient.value for gradient in gradients]
        wrapped.apply_gradients([*zip(ours, variables, strict=True)])

    if xla:
        update = tf.function(update, jit_compile=True, autograph=False)
    if not has_dynamic_scale(optimizer):
        update()
        return True
    _, is_finite = optimizer._loss_scale.update([norms])
    tf.cond(is_finite, update, lambda: None)
    return is_finite
