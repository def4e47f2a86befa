"""Restricts the services with which horovodrun and the workers of an elastic training talk to each other.

They exchange pickles, and loading a pickle can run any code. Horovod 0.28.1 loads pickles that anyone can send to
horovodrun's server, which has no password (CVE-2024-10190), and the replies of whatever addresses such a message names.
The server also gives away the key that signs messages to a worker. All these services listen on all network interfaces.

A token in its address is the server's password: see require_token. Nothing is encrypted.

Whoever knows neither can still connect. Such a connection is closed without a word after SILENCE seconds, its message
is not loaded, and it does not keep a process from ending.
"""
import hmac
import io
import pickle
import secrets
import struct
import sys
from types import SimpleNamespace

import cloudpickle
from horovod.runner.common.util import codec, secret
from horovod.runner.common.util import network as services
from horovod.runner.http import http_server
from horovod.runner.util import network

from common.errors import UserError

MESSAGES = {("horovod.runner.common.util.network", name) for name in ("PingRequest", "PingResponse", "AckResponse")} | {
    ("horovod.runner.elastic.worker", name) for name in ("HostsUpdatedRequest", "HostUpdateResult")}

FORBIDDEN = 403
SILENCE = 10.0  # seconds that a connection may say nothing
WAITING = 1024  # connections that may wait to be accepted; with Horovod's 5, others try again after 1, 3, 7 ... seconds
LARGEST = 1 << 20  # bytes of a message between an elastic worker and its launcher, which have about 200


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
        server.daemon_threads = True
        server.socket.listen(WAITING)
        server.RequestHandlerClass.timeout = SILENCE
        report = server.handle_error
        server.handle_error = lambda *connection: isinstance(sys.exception(), OSError) or report(*connection)
        return server, server.server_address[1]

    network.get_driver_ip = lambda interfaces: address  # what workers are told
    for module in (http_server, services):
        module.find_port = find_port
    for module in (codec, services):
        module.cloudpickle = SimpleNamespace(dumps=cloudpickle.dumps,
                                             loads=lambda content: Unpickler(io.BytesIO(content)).load())
    services.Wire.read = read_message


def read_message(wire: services.Wire, stream):
    """Returns the message that a stream begins with: its digest of 32 bytes, its size of 4, and its pickle.

    Raises EOFError, which Horovod's services ignore, if the digest is not that of the wire's key, or the message is too
    long. Horovod's own method first reads as many bytes as the size says, up to 2 GB, or to the stream's end.
    """
    digest, size = stream.read(secret.DIGEST_LENGTH), stream.read(4)
    length = struct.unpack("i", size)[0] if len(size) == 4 else -1
    content = stream.read(length) if 0 <= length <= LARGEST else b""
    if not secret.check_digest(wire._key, content, digest):
        raise EOFError
    return services.cloudpickle.loads(content)


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
