"""Elastic training: Horovod starts the workers anew that are left or have come, and training goes on with them."""
import functools
from collections.abc import Callable

import horovod.tensorflow as hvd
import horovod.tensorflow.elastic as hvd_elastic
from horovod.common.elastic import State

COMMIT_STEPS = 10  # updates from one moment that all workers keep in memory to the next


class Hosts(State):
    """What Horovod asks of a training; check_host_updates raises HostsUpdatedInterrupt, on all, when they have changed.

    An attempt agrees by itself on the moment to go on from: `save`, `restore` and `sync` have nothing to do.
    """

    def __init__(self):
        super().__init__(functools.partial(hvd.broadcast_object, name="hosts"), hvd.rank)

    def save(self):
        pass

    def restore(self):
        pass

    def sync(self):
        pass


def restarting(attempt: Callable) -> Callable:
    """A function that calls attempt(hosts), again whenever workers were lost or have come, and returns what it does.

    The attempt has to raise HorovodInternalError where a worker is lost.
    """
    return functools.partial(hvd_elastic.run(attempt), Hosts())
