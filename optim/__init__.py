"""The science: optimizers by name, and schedules. Knows nothing of data, models or Horovod.

The names can be listed, and the flags checked against them, without importing TensorFlow.
"""
import importlib
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerInfo:
    """A line of the registry: where the optimizer is, and which flags it reads."""

    module: str
    name: str
    options: tuple[str, ...]


OPTIMIZERS = {
    "lars": OptimizerInfo("optim.lars", "LARS",
                          ("momentum", "weight_decay", "trust_coefficient", "epsilon", "exclude")),
    "sgd": OptimizerInfo("optim.lars", "SGD", ("momentum", "weight_decay", "exclude")),
    "lamb": OptimizerInfo("tensorflow_addons.optimizers", "LAMB", ("weight_decay", "exclude")),  # arXiv:1904.00962
}


def create_optimizer(name: str, learning_rate: float, **options):
    """The Keras optimizer registered under `name`.

    options: momentum, weight_decay, trust_coefficient, epsilon, exclude; those it does not read are left out.
    """
    info = OPTIMIZERS[name]
    taken = {key: value for key, value in options.items() if key in info.options}
    if name == "lamb":  # its own word for the same thing
        taken["exclude_from_weight_decay"] = list(taken.pop("exclude", ())) or None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorflow-addons' notice that it is in maintenance
        module = importlib.import_module(info.module)
    return getattr(module, info.name)(learning_rate=learning_rate, **taken)
