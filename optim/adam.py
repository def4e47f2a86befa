"""Adam (arXiv:1412.6980) and AdamW (arXiv:1711.05101) of Keras."""
import tensorflow as tf

from .exclusion import check_exclusion, is_excluded


class AdamW(tf.keras.optimizers.AdamW):
    """Keras's AdamW, with `exclude` as in optim.lars.LARS. Without weight decay it is Adam.

    One kernel updates a variable. Keras launches 21, and TensorFlow takes seconds to prepare those of a large network.
    Without amsgrad.

    exclude: suffixes of names. These variables get no weight decay. Raises ValueError if no variable has one of these
        suffixes.
    """

    def __init__(self, learning_rate=0.001, weight_decay=0.0, exclude=(), **options):
        super().__init__(learning_rate, weight_decay=weight_decay, **options | {"amsgrad": False, "jit_compile": False})
        self.weight_decay = weight_decay or None  # Keras would still multiply each variable by 0
        self.exclude = tuple(exclude)

    def build(self, var_list):
        if not getattr(self, "_built", False):
            check_exclusion(self, var_list)
            self.exclude_from_weight_decay([v for v in var_list if is_excluded(v, self.exclude)])
        super().build(var_list)

    def _internal_apply_gradients(self, grads_and_vars):
        """Overrides the Keras hook that gets all gradients before `update_step`, to compute once what all need."""
        return super()._internal_apply_gradients(list(self._prepared(grads_and_vars)))

    def _prepared(self, grads_and_vars):
        """Yields (what `update_step` gets instead of the gradient, variable). Keras passes it on unchanged.

        It is the gradient and the numbers that ResourceApplyAdam takes, which are the same for all variables.
        """
        count = tf.cast(self.iterations + 1, tf.float32)
        numbers = {"lr": self.learning_rate, "beta1_power": self.beta_1**count, "beta2_power": self.beta_2**count,
                   "beta1": self.beta_1, "beta2": self.beta_2, "epsilon": self.epsilon}
        numbers = {name: tf.cast(number, tf.float32) for name, number in numbers.items()}
        for gradient, variable in grads_and_vars:
            yield (gradient, numbers), variable

    def update_step(self, gradient, variable):
        """Updates a variable. gradient: what `_prepared` has put in its place."""
        gradient, numbers = gradient
        index = self._index_dict[self._var_key(variable)]
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle, m=self._momentums[index].handle, v=self._velocities[index].handle,
            grad=tf.convert_to_tensor(gradient),
            **{name: tf.cast(number, variable.dtype) for name, number in numbers.items()})

    def get_config(self):
        return super().get_config() | {"weight_decay": self.weight_decay or 0.0, "exclude": list(self.exclude)}
