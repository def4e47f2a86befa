"""distributed/services.py: horovodrun's server answers only who has the token."""
import urllib.error
import urllib.request

import pytest
from horovod.runner.http import http_client, http_server

from common.errors import UserError
from distributed import services

PATCHED = ((services.network, "get_driver_ip"), (http_server, "find_port"), (services.services, "find_port"),
           (services.codec, "cloudpickle"), (services.services, "cloudpickle"))


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


def test_its_port_is_of_the_kernels_range(server):
    with open("/proc/sys/net/ipv4/ip_local_port_range") as limits:
        first, last = map(int, limits.read().split())
    assert first <= int(server[0].partition(":")[2]) <= last


def test_an_interface_without_an_address_is_an_error():
    with pytest.raises(UserError, match="no-such-interface has no IPv4 address"):
        services.restrict("no-such-interface")
