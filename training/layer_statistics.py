"""Weight norm, gradient norm and trust ratio of each variable at some updates (--log_trust_ratios)."""
import re

import tensorflow as tf

from distributed.optimizer import inner
from optim import info_of
from optim.stacks import norms_of


class LayerStatistics:
    """The norms of each variable and its gradient at the last recorded update, and the trust ratio with LARS.

    The ratio of an excluded variable is 1.
    """

    def __init__(self, optimizer, variables):
        self._optimizer = inner(optimizer)
        self._has_ratios = info_of(self._optimizer).has_trust_ratios
        self._variables = variables
        self.variable = tf.Variable(tf.zeros([len(variables), 3]), trainable=False, name="norms")

    def record(self, gradient_norms) -> None:
        """Records an update before it is applied. gradient_norms: of gradients averaged over the workers and unscaled.
        """
        weight_norms = norms_of(self._variables)
        ratios = tf.ones_like(weight_norms)
        if self._has_ratios:
            excluded = [self._optimizer.is_excluded(variable) for variable in self._variables]
            ratios = tf.where(excluded, ratios, self._optimizer.trust_ratios(weight_norms, gradient_norms))
        self.variable.assign(tf.stack([weight_norms, gradient_norms, ratios], axis=1))

    def collect(self) -> dict[str, list[float]]:
        """Returns variable -> [weight norm, gradient norm, and trust ratio if the optimizer has any].

        The names are the same in every process.
        """
        columns = 3 if self._has_ratios else 2
        return dict(zip(names_alone(self._variables), self.variable.numpy()[:, :columns].tolist(), strict=True))

    def ratios(self) -> list[float]:
        """Returns the factor of each gradient: its trust ratio, or 1."""
        return self.variable.numpy()[:, 2].tolist()


def names_alone(variables) -> list[str]:
    """Returns the names that the variables of a model have in a process that builds no other model.

    Keras counts the layers of each kind in a process, not in a model: conv2d, conv2d_1, and so on.
    """
    pattern = re.compile(r"(.*?)(?:_([0-9]+))?((?:/.*)?)")
    parts = [pattern.fullmatch(variable.name.split(":")[0]).groups() for variable in variables]
    counts = {}
    for kind, count, _ in parts:
        counts.setdefault(kind, set()).add(int(count or 0))
    order = {kind: sorted(seen) for kind, seen in counts.items()}
    numbered = [(kind, order[kind].index(int(count or 0)), rest) for kind, count, rest in parts]
    return [f"{kind}_{number}{rest}" if number else f"{kind}{rest}" for kind, number, rest in numbered]
