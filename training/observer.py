"""What an observer sees of a training. The run's folder and the progress display are observers.

`--observer=MODULE:NAME` adds a class of the user's own. All observers live on rank 0. They change nothing.
"""
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.dataset import Dataset


@dataclass(frozen=True)
class RunInfo:
    """A training that starts, resumes, or continues with other workers.

    plan: content of plan.json. flags: value of each flag. flags_text: content of flags.txt. recipe: the recipe that was
    read, or None. hosts: number of workers on each host. progress: training.state.Progress, how far it has come.
    origins: flag -> "command line" or "recipe", for the flags in flags.txt that are not at their defaults. images:
    returns so many training images after augmentation, uint8 (number, size, size, 3), of at most a size in pixels, and
    their classes; None for synthetic data.
    """

    folder: Path
    plan: dict
    flags: dict[str, Any]
    flags_text: str
    recipe: Path | None
    dataset: Dataset
    hosts: dict[str, int]
    progress: Any
    origins: dict[str, str] = field(default_factory=dict)
    images: Callable[[int, int], tuple[np.ndarray, list[str]]] | None = None


@dataclass(frozen=True)
class Update:
    """An update of the weights.

    number: index in the whole training, from 0. loss, top1: means over the global batch, before the update. waits: the
    fractions of the step that this worker waited for data and exchange, in the steps that are timed, otherwise empty.
    layers: variable -> [weight norm, gradient norm, trust ratio] at the first update if they are logged, otherwise
    empty.
    """

    number: int
    epoch: float
    batch_size: int
    learning_rate: float
    momentum: float
    loss: float
    top1: float
    waits: dict[str, float] = field(default_factory=dict)
    layers: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation, and the training since the one before.

    row: of metrics.jsonl. layers: as in Update. breakdown: the step-time breakdown as fractions. outcomes: label,
    predicted class, loss and rivals of each validation sample in the order of the dataset, float32 (samples, 4). Rivals
    are other classes that are at least as probable as the label. noise: of training.noise_scale.NoiseScale, or empty.
    hosts, workers: host, and mean seconds of a timed step (computing, waiting for data, exchange), by rank. slow: a
    sentence on each slow worker.
    """

    row: dict
    layers: dict[str, list[float]]
    breakdown: dict[str, float]
    outcomes: np.ndarray
    noise: dict = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)
    workers: list[list[float]] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)


class Observer:
    """Base class of observers. Every method does nothing; override those that you need.

    reads_folder: whether it reads what others write to the run's folder. It is then called after them.
    """

    reads_folder = False

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
