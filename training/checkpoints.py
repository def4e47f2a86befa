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


def load_model(path: str, model) -> int:
    """Loads the newest checkpoint's weights into a model; returns its epoch. Raises UserError if they do not fit."""
    try:
        found = path if Path(f"{path}.index").is_file() else tf.train.latest_checkpoint(path)
    except UnicodeDecodeError:
        found = None
    if not found:
        raise UserError(f"--checkpoint: {path} holds no checkpoint; a run keeps its own in RUN/checkpoints")
    epoch = tf.Variable(0, dtype=tf.int64)
    try:
        status = tf.train.Checkpoint(model=model, epoch=epoch).restore(found)
        status.assert_existing_objects_matched().expect_partial()
    except (IndexError, tf.errors.OpError) as error:
        raise UserError(f"--checkpoint: {found} cannot be read: {' '.join(str(error).split())[:200]}") from None
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--checkpoint: {found} does not fit the model {model.name}: {reason}") from None
    return int(epoch.numpy())
