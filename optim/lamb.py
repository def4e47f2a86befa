"""LAMB (arXiv:1904.00962) of tensorflow-addons."""
from tensorflow_addons.optimizers import LAMB as AddonsLAMB

from .exclusion import check_exclusion, is_excluded


class LAMB(AddonsLAMB):
    """LAMB of tensorflow-addons, with `exclude` as in optim.lars.LARS: suffixes of names instead of expressions.

    exclude: suffixes of names. These variables get no weight decay and no trust ratio. Raises ValueError if no variable
        has one of these suffixes.
    """

    def __init__(self, learning_rate=0.001, exclude=(), **options):
        super().__init__(learning_rate, **options)
        self.exclude = tuple(exclude)

    def _create_slots(self, var_list):
        check_exclusion(self, var_list)
        super()._create_slots(var_list)

    def _do_use_weight_decay(self, variable):
        return not is_excluded(variable, self.exclude)

    _do_layer_adaptation = _do_use_weight_decay

    def get_config(self):
        return super().get_config() | {"exclude": list(self.exclude)}
