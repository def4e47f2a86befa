"""Restricts the services with which horovodrun and the workers of an elastic training talk to each other.

They exchange pickles, and loading a pickle can run any code. Horovod 0.28.1 loads pickles that anyone can send to
horovodrun's server, which has no password (CVE-2024-10190), and the replies of whatever addresses such a message names.
The server also gives away the key that signs messages to a worker. All these services listen on all network interfaces.

A token in its address is the server's password: see require_token. Nothing is encrypted.
"""
import hmac
import io
import pickle
import secrets
from types import SimpleNamespace

import cloudpickle
from horovod.runner.common.util import codec
from horovod.runner.common.util import network as services
from horovod.runner.http import http_server
from horovod.runner.util import network

from common.errors import UserError

MESSAGES = {("horovod.runner.common.util.network", name) for name in ("PingRequest", "PingResponse", "AckResponse")} | {
    ("horovod.runner.elastic.worker", name) for name in ("HostsUpdatedRequest", "HostUpdateResult")}

FORBIDDEN = 403


class Unpickler(pickle.Unpickler):
    """Loads Horovod's messages and Python's own types. Raises UnpicklingError if a pickle names anything else."""

    def find_class(self, module, name):
        if (module, name) not in MESSAGES:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a message of Horovod")
        return super().find_class(module, name)


def restrict(interface: str) -> None:
    """Lets the services that this process starts from now on listen on one interface, and load only their messages.

    Their ports are the kernel's choice, so that a firewall can admit one range (net.ipv4.ip_local_port_range). Raises
    UserError if the interface has no IPv4 address.
    """
    try:
        address = network.get_driver_ip([interface])
    except (KeyError, RuntimeError):
        raise UserError(f"--network-interfaces: {interface} has no IPv4 address on this machine") from None

    def find_port(start):
        server = start((address, 0))
        return server, server.server_address[1]

    network.get_driver_ip = lambda interfaces: address  # what workers are told
    for module in (http_server, services):
        module.find_port = find_port
    for module in (codec, services):
        module.cloudpickle = SimpleNamespace(dumps=cloudpickle.dumps,
                                             loads=lambda content: Unpickler(io.BytesIO(content)).load())


def require_token() -> str:
    """Lets horovodrun's server answer only requests whose path begins with a token. Returns the token.

    Horovod asks http://ADDRESS:PORT/SCOPE/KEY. Workers that get `ADDRESS:PORT/TOKEN` in place of ADDRESS therefore ask
    http://ADDRESS:PORT/TOKEN:PORT/SCOPE/KEY.
    """
    token = secrets.token_hex(16)

    def parse_request(handler):
        if not super(http_server.KVStoreHandler, handler).parse_request():
            return False
        first, _, rest = handler.path[1:].partition("/")
        is_known = hmac.compare_digest(first.partition(":")[0].encode(), token.encode())
        handler.path = f"/{rest}"
        if not is_known:
            handler.send_status_code(FORBIDDEN)
        return is_known

    http_server.KVStoreHandler.parse_request = parse_request
    return token
