"""Elastic training: Horovod starts the workers anew that are left or have come, and training goes on with them."""
import functools
from collections.abc import Callable

import horovod.tensorflow as hvd
import horovod.tensorflow.elastic as hvd_elastic
from horovod.common.elastic import State

COMMIT_STEPS = 10


class Commits(State):
    """The last moment that all workers had in common, in each one's memory. keep: takes it.

    A session, each time it runs, agrees by itself on the moment to go on from: `restore` and `sync` have nothing left
    to do.
    """

    def __init__(self, keep: Callable):
        super().__init__(functools.partial(hvd.broadcast_object, name="hosts"), hvd.rank)
        self._keep = keep

    def save(self):
        self._keep()

    def restore(self):
        pass

    def sync(self):
        pass


def run(session: Callable, keep: Callable):
    """Runs session(commit) until it returns, again whenever workers were lost or have come; returns what it does.

    commit: what the session calls, on all workers at once, to keep a moment; it raises HostsUpdatedInterrupt, on all,
    when the hosts have changed. The session has to raise HorovodInternalError where a worker is lost.
    """
    commits = Commits(keep)
    return hvd_elastic.run(lambda state: session(state.commit))(commits)
