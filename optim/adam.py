"""Adam (arXiv:1412.6980) and AdamW (arXiv:1711.05101) of Keras."""
import tensorflow as tf

from .exclusion import check_exclusion, is_excluded


class AdamW(tf.keras.optimizers.AdamW):
    """Keras's AdamW, with `exclude` as in optim.lars.LARS. Without weight decay it is Adam.

    exclude: suffixes of names. These variables get no weight decay. Raises ValueError if no variable has one of these
        suffixes.
    """

    def __init__(self, learning_rate=0.001, weight_decay=0.0, exclude=(), **options):
        super().__init__(learning_rate, weight_decay=weight_decay, **options | {"jit_compile": False})
        self.weight_decay = weight_decay or None  # Keras would still multiply each variable by 0
        self.exclude = tuple(exclude)

    def build(self, var_list):
        if not getattr(self, "_built", False):
            check_exclusion(self, var_list)
            self.exclude_from_weight_decay([v for v in var_list if is_excluded(v, self.exclude)])
        super().build(var_list)

    def get_config(self):
        return super().get_config() | {"weight_decay": self.weight_decay or 0.0, "exclude": list(self.exclude)}
