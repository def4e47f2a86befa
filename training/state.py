"""All that a training needs to go on exactly where it is: the variables, the place in the plan, the running sums."""
import re
from dataclasses import dataclass, field, replace

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from optim import exchange


@dataclass
class Place:
    """How far a training has come; what comes next follows from it and the plan, on any number of workers.

    step: updates made. samples: processed. evaluations: made, which is the rows of metrics.jsonl. piece_step: the step
    at which the piece of the stream begins that is being read. skipped: samples of the stream that were passed over,
    after `rollbacks` divergences. seconds, trained_seconds: of this training in all its runs, and of its steps alone.
    """

    step: int = 0
    samples: int = 0
    evaluations: int = 0
    piece_step: int = 0
    skipped: int = 0
    rollbacks: int = 0
    seconds: float = 0.0
    trained_seconds: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """A moment of a training. tensors: every variable, by name. sums: each worker's Totals, float64 (workers, 4).

    Holding one costs nothing until a variable is assigned to: TensorFlow then leaves its old buffer to the snapshot.
    """

    tensors: dict[str, tf.Tensor] = field(repr=False)
    place: Place
    sums: np.ndarray

    @property
    def workers(self) -> int:
        return len(self.sums)


class State:
    """The state of a training under way."""

    def __init__(self, model, optimizer, totals, norms=None):
        self.model, self.optimizer, self.totals, self.norms, self.place = model, optimizer, totals, norms, Place()
        recorded = {"layer_norms": norms.variable} if norms else {}
        self.variables = named("model", model.variables) | named("optimizer", exchange.variables(optimizer)) | recorded

    def snapshot(self) -> Snapshot:
        """The present moment; every worker has to ask for it at once."""
        sums = self.totals.variable.read_value()
        sums = hvd.allgather(sums[None], name="sums").numpy() if hvd.size() > 1 else sums.numpy()[None]
        return Snapshot({name: v.read_value() for name, v in self.variables.items()}, replace(self.place), sums)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes back to a snapshot, or on from another run's. Where the world has changed, rank 0 takes all the sums."""
        for name, variable in self.variables.items():
            variable.assign(snapshot.tensors[name])
        self.place = replace(snapshot.place)
        self._share_out(snapshot.sums)

    def broadcast(self, snapshot: Snapshot | None, root: int = 0) -> int | None:
        """Gives every worker the state of rank `root`: its snapshot's or, where it has none, the one that it is in.

        Returns the number of workers that the snapshot is of, or None where there was none.
        """
        if snapshot and hvd.rank() == root:
            self.restore(snapshot)
        told = (self.place, snapshot and snapshot.sums)
        self.place, sums = hvd.broadcast_object(told, root_rank=root, name="place")
        broadcast_variables(list(self.variables.values()), root)
        if sums is None:
            return None
        self._share_out(sums)
        return len(sums)

    def _share_out(self, sums) -> None:
        rank, size = hvd.rank(), hvd.size()
        own = sums[rank] if len(sums) == size else sums.sum(axis=0) if rank == 0 else np.zeros_like(sums[0])
        self.totals.variable.assign(own)


def broadcast_variables(variables, root: int) -> None:
    """Gives every worker rank root's values, all in one graph; hvd.broadcast_variables has AutoGraph convert it."""
    @tf.function(autograph=False)
    def broadcast():
        for number, variable in enumerate(variables):
            variable.assign(hvd.broadcast(variable, root, name=f"variable_{number}"))

    if hvd.size() > 1:
        broadcast()


def named(group: str, variables) -> dict[str, tf.Variable]:
    """Variables by names that are the same in every process: Keras numbers its layers through a process."""
    return {f"{group}/{number:03}/{re.sub(r'_[0-9]+(?=/|$)', '', variable.name.split(':')[0])}": variable
            for number, variable in enumerate(variables)}
