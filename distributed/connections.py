"""Ends the connections that Horovod leaves open when it shuts down, so that who waits at their other end notices.

Horovod 0.28.1 closes those of process sets, also of the one with all workers, only when it makes the next ones: its
GlooContext::Finalize does nothing in a context that was never enabled, and it enables its first one alone. When a
worker is lost, some notice at once, shut down, and wait for all at the next rendezvous. One that waited for these, and
not for the lost one, noticed nothing before Gloo's time-out of 30 s.
"""
import contextlib
import os
import socket
import stat
from collections.abc import Iterator

_opened: set[int] = set()  # inodes of the sockets that Horovod has opened in its last start


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Context manager in which Horovod starts. Notes what it opens, for `hang_up`."""
    before = _sockets()
    yield
    _opened.clear()
    _opened.update(_sockets().keys() - before.keys())


def hang_up() -> None:
    """Shuts down the connections, if there are any left, that were opened in `noted`. Horovod must have shut down."""
    for inode, descriptor in _sockets().items():
        if inode in _opened:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if os.fstat(connection.fileno()).st_ino == inode and connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """Returns inode -> descriptor of each socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # one that was closed meanwhile
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found[about.st_ino] = int(name)
    return found
