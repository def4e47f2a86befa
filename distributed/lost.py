"""A worker that is no longer there, as the others notice it."""
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import UserError


def is_lost(error) -> bool:
    """Whether it is Horovod's error where another worker is no longer there.

    TensorFlow names the node that failed, which need not tell that it is Horovod's, and where it was made, which does.
    """
    if "horovod" not in sys.modules:
        return False
    from horovod.common.exceptions import HorovodInternalError

    return isinstance(error, HorovodInternalError) or ("dali" not in str(error).lower() and any(
        sign in str(error) for sign in ("Horovod", "/horovod/tensorflow/")))


@contextmanager
def lost_is_user_error() -> Iterator[None]:
    """Raises UserError wherever another worker is no longer there."""
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
    """Raises HorovodInternalError wherever another worker is no longer there, as elastic training has to hear it."""
    import tensorflow as tf
    from horovod.common.exceptions import HorovodInternalError

    try:
        yield
    except tf.errors.OpError as error:
        if is_lost(error):
            raise HorovodInternalError(str(error)) from None
        raise
