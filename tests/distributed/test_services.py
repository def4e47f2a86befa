"""distributed/services.py: horovodrun's server answers only who has the token."""
import hmac
import io
import pickle
import struct
import urllib.error
import urllib.request

import pytest
from conftest import run
from horovod.runner.http import http_client, http_server

from common.errors import UserError
from distributed import services

PATCHED = ((services.network, "get_driver_ip"), (http_server, "find_port"), (services.services, "find_port"),
           (services.codec, "cloudpickle"), (services.services, "cloudpickle"), (services.services.Wire, "read"))


@pytest.fixture
def server(monkeypatch):
    """Yields (address, token) of a server on the loopback interface."""
    for module, name in PATCHED:
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(http_server.KVStoreHandler, "parse_request", http_server.KVStoreHandler.parse_request)
    services.restrict("lo")
    token, server = services.require_token(), http_server.RendezvousServer()
    port = server.start()
    server.init([])
    yield f"127.0.0.1:{port}", token
    server.stop()


def answer(method: str, address: str) -> int:
    request = urllib.request.Request(f"http://{address}", data=b"x" if method == "PUT" else None, method=method)
    try:
        return urllib.request.urlopen(request, timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_no_request_without_the_token_is_answered(server, method):
    address, token = server
    assert answer("PUT", f"{address}/{token}/global/0") == 200
    for path in ("global/0", f"{token[:-1]}/global/0", f"{'0' * 32}/global/0", f"global/0/{token}", ""):
        assert answer(method, f"{address}/{path}") == 403
    assert answer("GET", f"{address}/{token}/global/0") == 200  # nothing was deleted


def test_horovods_client_puts_the_port_behind_the_token(server):
    address, token = server
    where = f"{address}/{token}", address.partition(":")[2], "scope", "key"
    http_client.put_data_into_kvstore(*where, "value")
    assert http_client.read_data_from_kvstore(*where) == "value"


STRANGERS = """
import os, socket, struct, sys, threading, time
from horovod.runner.common.util import network
from horovod.runner.elastic import worker
from horovod.runner.http import http_server
from distributed import services
services.SILENCE = 1.0
services.restrict("lo")
services.require_token()
server = http_server.RendezvousServer()
notified = worker.WorkerNotificationService(b"k" * 32, "lo", worker.WorkerNotificationManager())
ports, held, ended = (server.start(), notified.get_port()), [], []
server.init([])

def connected(port, data):
    held.append(socket.create_connection(("127.0.0.1", port), timeout=60))
    held[-1].sendall(data)
    return held[-1]

for port in ports:
    for data in (b"", b"G", b"GET / HTTP/1.1\\r\\n", b"[" * 2000, *map(os.urandom, (1, 36, 1000)),
                 *(b"d" * 32 + struct.pack("i", size) + b"p" * 100 for size in (2**31 - 1, -1, -100, 100, 0))):
        connected(port, data)
        reset = connected(port, data)
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
    for _ in range(100):
        connected(port, b"")
info = (one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104) for one in held if one.fileno() >= 0)
print("packets sent again:", sum(struct.unpack_from("I", one, 100)[0] for one in info))  # tcpi_total_retrans
client = network.BasicClient(notified.NAME, notified.addresses(), b"k" * 32, 0)
print("answered:", client.addresses() == notified.addresses())
for connection in held:
    if connection.fileno() >= 0:
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass
print("all are closed")
for port in ports:
    connected(port, b"G")
print("threads:", {thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()})
"""


def test_connections_of_strangers_are_closed_without_a_word_and_keep_no_process_alive():
    """Noise, messages that claim any size, half a request, resets, and many that say nothing. None has to try again."""
    done = run("python", 1, "-c", STRANGERS, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.splitlines() == ["packets sent again: 0", "answered: True", "all are closed", "threads: {True}"]


class Recorded(io.BytesIO):
    """A stream that records how many bytes are asked for."""

    asked = 0

    def read(self, size=-1):
        self.asked = max(self.asked, size if size >= 0 else 2**31)
        return super().read(size)


@pytest.mark.parametrize("size", [None, -1, -2**31, 0, 5, 2**20 + 1, 2**31 - 1])
def test_only_a_message_with_the_digest_of_the_key_is_loaded_and_no_size_is_believed(server, size):
    """None: the message's own."""
    wire, message = services.services.Wire(b"k" * 32), pickle.dumps("text")
    for key in (b"k", b"l"):
        digest = hmac.digest(key * 32, message, "sha256")
        stream = Recorded(digest + struct.pack("i", len(message) if size is None else size) + message)
        if size is None and key == b"k":
            assert wire.read(stream) == "text"
        else:
            with pytest.raises(EOFError):
                wire.read(stream)
        assert stream.asked <= 2**20


def test_its_port_is_of_the_kernels_range(server):
    with open("/proc/sys/net/ipv4/ip_local_port_range") as limits:
        first, last = map(int, limits.read().split())
    assert first <= int(server[0].partition(":")[2]) <= last


def test_an_interface_without_an_address_is_an_error():
    with pytest.raises(UserError, match="no-such-interface has no IPv4 address"):
        services.restrict("no-such-interface")
