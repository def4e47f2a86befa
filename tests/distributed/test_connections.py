"""As soon as one connection of Horovod's is closed at its other end, all of them are shut down, and nothing else."""
import contextlib
import socket

import pytest

from distributed import connections


def connection(server):
    mine = socket.create_connection(server.getsockname())
    return mine, server.accept()[0]


def is_open(mine, theirs):
    """Whether what one end sends arrives at the other one."""
    with contextlib.suppress(OSError):
        mine.sendall(b"x")
        return theirs.recv(1) == b"x"
    return False


@pytest.fixture
def opened():
    """A server on this machine, a connection from before Horovod's start, and three that this has opened."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        earlier = connection(server)
        with connections.noted():
            mine = [socket.create_connection(server.getsockname()) for _ in range(3)]
        noted = [(one, server.accept()[0]) for one in mine]
        for pair in (earlier, *noted):
            pair[1].settimeout(10)
        yield server, earlier, noted
        for end in (*earlier, *(end for pair in noted for end in pair)):
            end.close()


def test_the_first_one_that_is_lost_takes_the_others_with_it(opened):
    server, earlier, (lost, second, third) = opened
    with connections.watched():
        later = connection(server)
        lost[1].close()
        for pair in (second, third):
            assert pair[1].recv(1) == b""  # the other worker notices, and so does this one
            assert pair[0].recv(1) == b""
    assert is_open(*earlier) and is_open(*later)
    for end in later:
        end.close()


def test_what_this_process_closes_itself_is_closed_at_once_and_takes_nothing_with_it(opened):
    _, earlier, (closed, second, third) = opened
    with connections.watched():
        closed[0].close()
        assert closed[1].recv(1) == b""
        assert all(is_open(*pair) for pair in (earlier, second, third))
    second[1].close()  # is no longer watched
    assert is_open(*third)


def test_a_descriptor_that_means_something_else_by_now_is_not_watched(opened):
    server, _, (closed, second, _) = opened
    descriptor = closed[0].fileno()
    closed[0].close()
    other = connection(server)
    assert other[0].fileno() == descriptor  # the lowest that is free
    with connections.watched():
        other[1].close()
        assert other[0].recv(1) == b""
        assert is_open(*second)
    other[0].close()
