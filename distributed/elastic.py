"""Elastic training: when workers leave or join, Horovod restarts, and training continues with the current workers."""
import functools
import os
from collections.abc import Callable

import horovod.tensorflow as hvd
from horovod.common.elastic import State, run_fn

from distributed import connections, services

COMMIT_STEPS = 10  # updates between the snapshots that all workers keep in memory


class Hosts(State):
    """Watches the hosts for Horovod, which requires this as the state of an elastic training.

    check_host_updates raises HostsUpdatedInterrupt on all ranks if hosts were added or removed. `save`, `restore` and
    `sync` do nothing, because the workers of an attempt agree on the snapshot to resume from (training/run.py).
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
    """Returns a function that calls attempt(hosts), repeats it when workers are lost or join, and returns its result.

    The attempt has to raise HorovodInternalError if a worker is lost, and to call hosts.check_host_updates regularly.
    """
    services.restrict(os.environ["HOROVOD_GLOO_IFACE"])

    def watched(hosts):
        with connections.watched():
            return attempt(hosts)

    return functools.partial(run_fn(watched, _restart), Hosts())


def _restart() -> None:
    """Horovod's own restart, but for the connections."""
    hvd.shutdown()
    with connections.noted():
        hvd.init()
