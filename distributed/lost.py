"""Detects from an error that another worker is gone."""
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import UserError


def is_lost(error) -> bool:
    """Whether this is Horovod's error for a worker that is gone.

    TensorFlow's message names the failed node, which may not mention Horovod, and where it was created, which does.
    """
    if "horovod" not in sys.modules:
        return False
    from horovod.common.exceptions import HorovodInternalError

    return isinstance(error, HorovodInternalError) or ("dali" not in str(error).lower() and any(
        sign in str(error) for sign in ("Horovod", "/horovod/tensorflow/")))


@contextmanager
def lost_is_user_error() -> Iterator[None]:
    """Raises UserError if another worker is gone."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_lost(error):
            raise
        raise UserError("another worker has stopped; its own message says why, unless it was killed") from None


@contextmanager
def lost_is_internal_error() -> Iterator[None]:
    """Raises HorovodInternalError, which elastic training expects, if another worker is gone."""
    import tensorflow as tf
    from horovod.common.exceptions import HorovodInternalError

    try:
        yield
    except tf.errors.OpError as error:
        if is_lost(error):
            raise HorovodInternalError(str(error)) from None
        raise
