"""What an observer sees of a training, and --observer=MODULE:NAME, which adds a class of the user's own.

The run's folder and the progress display are written by observers. All observers live on rank 0. They do not influence
the training.
"""
import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common import own
from common.errors import UserError, complain
from data.dataset import Dataset
from plan.expected import Expected
from training.outcomes import Outcomes

METHODS = ("start", "step", "evaluation", "rewind", "end", "close")  # of a user's observer


@dataclass(frozen=True)
class RunInfo:
    """A training that starts, resumes, or continues with other workers."""

    folder: Path  # of the run
    plan: dict  # content of plan.json
    flags: dict[str, Any]  # value of each flag
    flags_text: str  # content of flags.txt
    recipe: Path | None  # the recipe that was read
    dataset: Dataset
    hosts: dict[str, int]  # number of workers on each host
    progress: Any  # training.state.Progress: how far the training has come
    # Flag -> "command line" or "recipe", for the flags in flags.txt that are not at their defaults.
    origins: dict[str, str] = field(default_factory=dict)
    # Returns (training images after augmentation, uint8 (number, size, size, 3), their classes) for a number of images
    # and the largest size in pixels. None for synthetic data.
    images: Callable[[int, int], tuple[np.ndarray, list[str]]] | None = None
    expected: Expected | None = None  # the curve of --expect


@dataclass(frozen=True)
class Update:
    """An update of the weights."""

    number: int  # index in the whole training, from 0
    epoch: float
    batch_size: int
    learning_rate: float
    momentum: float
    loss: float  # mean over the global batch, before the update
    top1: float  # likewise
    # The fractions of the step that this worker waited for data and exchange, or empty if the step was not timed.
    waits: dict[str, float] = field(default_factory=dict)
    # Variable -> [weight norm, gradient norm, and with LARS its trust ratio] at the first update, or empty if they are
    # not logged.
    layers: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation, and the training since the one before."""

    row: dict  # of metrics.jsonl
    layers: dict[str, list[float]]  # as in Update, at the last update
    breakdown: dict[str, float]  # the step-time breakdown as fractions
    outcomes: Outcomes
    noise: dict = field(default_factory=dict)  # of training.noise_scale.NoiseScale, or empty
    hosts: list[str] = field(default_factory=list)  # by rank
    # Mean seconds of a timed step by rank: computing, waiting for data, exchange.
    workers: list[list[float]] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)  # a sentence on each slow worker
    expected: float | None = None  # top-1 of --expect at this epoch, if it has one


class Observer:
    """Base class of observers. Every method does nothing; override those that you need."""

    def start(self, run: RunInfo) -> None:
        """Called before the first update of a process."""

    def launching(self, number: int) -> AbstractContextManager:
        """Returns a context manager for the launch of a step."""
        return contextlib.nullcontext()

    def step(self, update: Update) -> None:
        """Called after each update, in order, about one step late."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Called after each evaluation."""

    def rewind(self, progress) -> None:
        """Called after a rollback (--on_divergence=rollback). progress: training.state.Progress."""

    def end(self, summary: dict) -> None:
        """Called at the end of the training. summary: content of summary.json."""

    def close(self) -> None:
        """Called last, also after an error, a stop or a loss of workers, if `start` was."""


class UserObserver(Observer):
    """An observer of the user's own. Its class may lack methods of Observer, which are then not called.

    An exception in `start` ends training before the first step. Later exceptions are reported once for each method, and
    training continues. An attempt to end the process, such as sys.exit(), counts as an exception.

    methods: those of METHODS that it has, by name.
    """

    def __init__(self, name: str, observer):
        self._name = name
        self.methods = {method: call for method in METHODS if callable(call := getattr(observer, method, None))}
        self._failed = set()
        self._is_started = False

    def start(self, run) -> None:
        with own.calling(f"--observer={self._name}"):
            self.methods.get("start", _ignore)(run)
        self._is_started = True

    def _call(self, method, *arguments):
        try:
            with own.calling(f"--observer={self._name}: {method}() failed, training continues"):
                self.methods.get(method, _ignore)(*arguments)
        except UserError as error:
            if method not in self._failed:
                complain(f"warning: {error}")
            self._failed.add(method)

    step = functools.partialmethod(_call, "step")
    evaluation = functools.partialmethod(_call, "evaluation")
    rewind = functools.partialmethod(_call, "rewind")
    end = functools.partialmethod(_call, "end")

    def close(self) -> None:
        if self._is_started:
            self._call("close")


def _ignore(*_):
    pass


def load_observers(names: Sequence[str]) -> list[UserObserver]:
    """Creates the observers of --observer=MODULE:NAME. The current folder is searched for modules last.

    Raises UserError for whatever goes wrong, in the user's code, too.
    """
    return [_load(name) for name in names]


def _load(name) -> UserObserver:
    made = own.load("--observer", name)
    with own.calling(f"--observer={name}"):
        observer = UserObserver(name, made())
    if not observer.methods:
        raise UserError(f"--observer={name}: {name.partition(':')[2]}() has none of the methods {', '.join(METHODS)}; "
                        "see docs/observers.md")
    return observer
