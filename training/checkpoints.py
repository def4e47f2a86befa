"""Checkpoints: model, optimizer and the number of the evaluation that they belong to."""
from pathlib import Path

import tensorflow as tf

from training.errors import UserError

KEPT = 5


class Checkpoints:
    """RUN/checkpoints, written by rank 0."""

    def __init__(self, folder, model, optimizer):
        self._checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=tf.Variable(0, dtype=tf.int64))
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(folder), max_to_keep=KEPT)

    def save(self, epoch: int) -> None:
        self._checkpoint.epoch.assign(epoch)
        self._manager.save(checkpoint_number=epoch)


def newest(path: str) -> str:
    """The newest checkpoint in a folder, or the one that a path without its ending names. Raises UserError."""
    if Path(f"{path}.index").is_file():
        return path
    found = tf.train.latest_checkpoint(path) if Path(path).is_dir() else None
    if not found:
        raise UserError(f"--checkpoint: {path} holds no checkpoint; a run keeps its own in RUN/checkpoints")
    return found


def load_model(path: str, model) -> int:
    """Loads the newest checkpoint's weights into a model; returns its epoch. Raises UserError if they do not fit."""
    found = newest(path)
    epoch = tf.Variable(0, dtype=tf.int64)
    try:
        status = tf.train.Checkpoint(model=model, epoch=epoch).restore(found)
        status.assert_existing_objects_matched().expect_partial()
    except (AssertionError, ValueError, tf.errors.OpError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--checkpoint: {found} does not fit the model {model.name}: {reason}") from None
    return int(epoch.numpy())
