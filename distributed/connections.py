"""Lets all workers notice at once that one of them is lost, by the connections that Horovod has among them.

A worker whose connection to a lost one breaks gets an error, but Horovod 0.28.1 keeps its connections to the others. It
then waits for them in the next operation, and they for it in the one before, until Gloo's time-out of 30 s. Therefore,
the first broken connection makes a worker shut down all its own, which the others notice in turn.
"""
import contextlib
import os
import select
import socket
import stat
from collections.abc import Iterator

from common.threads import start_service

_opened: dict[int, int] = {}  # inode -> descriptor of the sockets that Horovod has opened in its last start


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Context manager in which Horovod starts. Notes the connections that it opens, which `watched` watches."""
    before = _connections()
    yield
    _opened.clear()
    _opened.update((inode, descriptor) for inode, descriptor in _connections().items() if inode not in before)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Context manager in which all connections of `noted` are shut down as soon as the other end of one closes it.

    epoll does not keep a connection open that Horovod closes. poll does, and so does a copy of its descriptor.
    """
    reads, writes = os.pipe()
    with select.epoll() as broken:
        broken.register(reads, select.EPOLLIN)
        for inode, descriptor in _opened.items():
            if _inode(descriptor) == inode:
                broken.register(descriptor, select.EPOLLRDHUP)

        def watch():
            if any(descriptor != reads for descriptor, _ in broken.poll()):
                _hang_up()

        watcher = start_service("connections", watch)
        try:
            yield
        finally:
            os.close(writes)
            watcher.join()
            os.close(reads)


def _hang_up() -> None:
    """Shuts down the connections of `noted` that are still open."""
    for inode, descriptor in _opened.items():
        if _inode(descriptor) == inode:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if _inode(connection.fileno()) == inode:  # still
                    connection.shutdown(socket.SHUT_RDWR)


def _connections() -> dict[int, int]:
    """Returns inode -> descriptor of each connected socket of this process."""
    found = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if inode := _inode(descriptor):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()
                found[inode] = descriptor
    return found


def _inode(descriptor: int) -> int | None:
    """Returns the inode of a descriptor if it is a socket."""
    with contextlib.suppress(OSError):  # closed
        about = os.fstat(descriptor)
        return about.st_ino if stat.S_ISSOCK(about.st_mode) else None
