"""What Horovod leaves open is shut down, and nothing else."""
import socket

from distributed import connections


def connection(server):
    mine = socket.create_connection(server.getsockname())
    return mine, server.accept()[0]


def test_only_connections_that_were_opened_meanwhile_are_shut_down():
    with socket.create_server(("127.0.0.1", 0)) as server:
        earlier = connection(server)
        with connections.noted(), socket.create_server(("127.0.0.1", 0)) as listening:
            left, closed = connection(server), connection(server)
            listening = socket.socket(fileno=listening.detach())
        later = connection(server)
        closed[0].close()
        connections.hang_up()
        connections.hang_up()
        for pair in (left, closed):
            pair[1].settimeout(10)
            assert pair[1].recv(1) == b""
        for mine, theirs in (earlier, later, connection(listening)):
            mine.sendall(b"x")
            assert theirs.recv(1) == b"x"
        for one in (*earlier, *left, closed[1], *later, listening):
            one.close()
