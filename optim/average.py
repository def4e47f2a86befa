"""An exponential moving average (EMA) of a model's weights (Polyak and Juditsky 1992; arXiv:1512.00567, section 8)."""
import contextlib
from collections.abc import Iterator

import tensorflow as tf


class WeightAverage:
    """The moving average of a model's weights, which starts at their initial values.

        average <- decay * average + (1 - decay) * weight        after each update

    decay: for an update of `batch_size` samples. An update of n times as many samples decays by decay ** n, so that the
    average spans the same number of samples.

    moving_statistics: whether to average batch norm's moving mean and variance, too. Give false if they are measured
    before each evaluation. The average then keeps the statistics that were last measured inside `swapped_in`.
    """

    def __init__(self, model, decay: float, batch_size: int, moving_statistics: bool = True):
        self._decay = decay
        self._batch_size = batch_size
        self._weights = [variable for variable in model.variables if variable.dtype.is_floating]
        averaged = model.variables if moving_statistics else model.trainable_variables
        self._updated = {variable.ref() for variable in averaged}
        self.variables = [tf.Variable(variable, trainable=False, name=variable.name.split(":")[0])
                          for variable in self._weights]

    def update(self, batch_size: int) -> None:
        """Moves the average towards the current weights. batch_size: number of samples of the update just made."""
        rate = 1 - self._decay ** (batch_size / self._batch_size)
        for weight, average in zip(self._weights, self.variables, strict=True):
            if weight.ref() in self._updated:
                average.assign_add(rate * (weight - average))

    def restart(self) -> None:
        """Starts again from the model's current weights."""
        for weight, average in zip(self._weights, self.variables, strict=True):
            average.assign(weight)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Exchanges the weights of the model with the average while the context lasts."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self):
        for weight, average in zip(self._weights, self.variables, strict=True):
            value = weight.read_value()
            weight.assign(average)
            average.assign(value)
