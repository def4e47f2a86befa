"""Errors of Horovod that a user can understand: it cannot be loaded, or another worker is gone.

An error outside of World.raise_on_all_ranks ends only the rank that raises it. The other ranks learn it from the
collective that they wait in, where Horovod raises an error, unless their launcher kills them before.
"""
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import UserError
from distributed.gpus import NCCL_BUILD

LOST = "another worker has stopped; its own message says why, unless it was killed"
HEAD_START = 2  # seconds by which other workers end later than the lost one, because a launcher names the first to end


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
def explain_horovods_errors() -> Iterator[None]:
    """Raises UserError if Horovod cannot be loaded, or if another worker is gone."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if missing := re.search(r"(libnccl\S*): cannot open shared object file", str(error)):
            raise UserError(f"Horovod was compiled with {missing[1]}, which is missing; compile it for CPUs with "
                            f"'uv sync --reinstall-package horovod', or for GPUs with '{NCCL_BUILD}'") from None
        if not is_lost(error):
            raise
        time.sleep(HEAD_START)
        raise UserError(LOST) from None


@contextmanager
def lost_is_internal_error() -> Iterator[None]:
    """Raises HorovodInternalError, which elastic training expects, with words for a user if another worker is gone."""
    import tensorflow as tf
    from horovod.common.exceptions import HorovodInternalError

    try:
        yield
    except (tf.errors.OpError, HorovodInternalError) as error:
        if is_lost(error):
            raise HorovodInternalError(LOST) from None
        raise
