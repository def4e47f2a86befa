"""Exact evaluation: each validation sample counts once, for any number of workers and any remainder."""
from collections.abc import Callable

import tensorflow as tf

from distributed.world import World
from training.bad_input import bad_input_is_user_error
from training.step import Totals, make_evaluation_step

BATCHES_UNASKED = 16  # batches from one check for a request to stop to the next


class Evaluator:
    """Evaluates a model on this worker's shard of the validation set and sums over the workers."""

    def __init__(self, model, feed, batch_size: int, world: World):
        self._totals = Totals()
        self._step = make_evaluation_step(model, self._totals)
        self._feed, self._batch_size, self._world = feed, batch_size, world

    def __call__(self, stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Returns val_loss, val_top1, val_top5 (means over all samples), val_top1_count, val_top5_count, val_samples.

        stop: called every BATCHES_UNASKED batches, on all workers at once. If it returns true, the result is None.
        """
        most = -(-self._feed.dataset.validation.samples // self._feed.shards)
        with self._feed.validation(self._batch_size) as (batches, samples):
            for number, start in enumerate(range(0, most, self._batch_size)):
                if number % BATCHES_UNASKED == 0 and stop():
                    self._totals.reset()
                    return None
                if start >= samples:
                    continue
                with bad_input_is_user_error(f"evaluation stopped at sample {start}", batches, start):
                    self._step(batches.iterator, tf.constant(min(self._batch_size, samples - start)))
        return {f"val_{name}": value for name, value in self._totals.collect(self._world).items()}
