"""Optimizers by name, and schedules, independent of data, models and Horovod.

Listing the names and checking flags against them does not import TensorFlow.
"""
import importlib
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerInfo:
    """An entry of the registry."""

    module: str  # with a dot: in this package
    name: str  # of the class
    options: tuple[str, ...]  # the flags that it reads
    rate: float = 0.001  # a learning rate to try first
    scaling: str = "linear"  # of the learning rate with the batch size, to try first (docs/large_batches.md)
    takes_scaled: bool = False  # whether its gradients may be optim.stacks.Scaled
    has_trust_ratios: bool = False  # whether it has `trust_ratios` and `is_excluded`, as optim.lars.LARS
    shares_matrices: bool = False  # whether workers can divide its updates among themselves, as with optim.muon.Share


OPTIMIZERS = {
    "lars": OptimizerInfo(".lars", "LARS", ("momentum", "weight_decay", "trust_coefficient", "epsilon", "exclude",
                                            "nesterov", "clip", "jit_compile"), 5, takes_scaled=True,
                          has_trust_ratios=True),
    "sgd": OptimizerInfo(".lars", "SGD", ("momentum", "weight_decay", "exclude", "nesterov"), 0.1, takes_scaled=True),
    "lamb": OptimizerInfo(".lamb", "LAMB", ("weight_decay", "exclude"), 0.01),
    "muon": OptimizerInfo(".muon", "Muon", ("momentum", "weight_decay", "exclude"), 0.05, "sqrt", shares_matrices=True),
    "adam": OptimizerInfo(".adam", "AdamW", ()),
    "adamw": OptimizerInfo(".adam", "AdamW", ("weight_decay", "exclude")),
}


UNKNOWN = OptimizerInfo("", "", ())  # an optimizer that is not in the registry


def with_option(option: str) -> list[str]:
    """Returns the names of the optimizers that read an option."""
    return [name for name, info in OPTIMIZERS.items() if option in info.options]


def info_of(optimizer) -> OptimizerInfo:
    """Returns the entry of an optimizer, also of one in Horovod's DistributedOptimizer, a subclass of its class."""
    entries = {(info.module, info.name): info for info in OPTIMIZERS.values()}
    classes = ((kind.__module__.removeprefix(__name__), kind.__name__) for kind in type(optimizer).__mro__)
    return next((entries[own] for own in classes if own in entries), UNKNOWN)


def create_optimizer(name: str, learning_rate: float, **options):
    """Creates the Keras optimizer registered under `name`.

    options: momentum, weight_decay, trust_coefficient, epsilon, exclude, nesterov, clip, and jit_compile, which is not
    Keras's (see LARS). Those that it does not read are ignored.
    """
    info = OPTIMIZERS[name]
    taken = {key: value for key, value in options.items() if key in info.options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorflow-addons' notice that it is in maintenance
        module = importlib.import_module(info.module, __package__)
    return getattr(module, info.name)(learning_rate=learning_rate, **taken)
