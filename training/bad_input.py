"""Input errors during training, reported in one line, with the record's name if it is known."""
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from common.errors import UserError, reason
from data.damage import input_reason
from data.spool import SpoolEnded
from distributed.lost import is_lost


@contextmanager
def bad_input_is_user_error(stopped: str, batches, read: int, size_flag: str = "--micro_batch_size") -> Iterator[None]:
    """Raises UserError for data that cannot be read or does not fit in the device's memory.

    stopped: what the error stopped, which starts the message. read: number of samples of `batches` read before.
    size_flag: sets the size of a micro-batch.
    """
    try:
        yield
    except SpoolEnded as error:
        raise SpoolEnded(f"{stopped}: {error}") from None
    except tf.errors.OpError as error:
        if is_lost(error):
            raise
        if isinstance(error, tf.errors.ResourceExhaustedError):
            raise UserError(f"{stopped}: the device ran out of memory; use a smaller {size_flag}") from None
        if "deterministic XLA" in str(error):
            raise UserError(f"{stopped}: {reason(error)} Use --xla=auto, or remove --xla or --deterministic") from None
        raise UserError(f"{stopped}: {input_reason(error, batches, read)}") from None
