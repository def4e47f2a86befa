"""Restricts the services with which horovodrun and the workers of an elastic training talk to each other.

They exchange pickles, and loading a pickle can run any code. Horovod 0.28.1 loads pickles that anyone can send to
horovodrun's server, which has no password (CVE-2024-10190), and the replies of whatever addresses such a message names.
The server also gives away the key that signs messages to a worker. All these services listen on all network interfaces.
"""
import io
import pickle
from types import SimpleNamespace

import cloudpickle
from horovod.runner.common.util import codec
from horovod.runner.common.util import network as services
from horovod.runner.http import http_server
from horovod.runner.util import network

from common.errors import UserError

MESSAGES = {("horovod.runner.common.util.network", name) for name in ("PingRequest", "PingResponse", "AckResponse")} | {
    ("horovod.runner.elastic.worker", name) for name in ("HostsUpdatedRequest", "HostUpdateResult")}


class Unpickler(pickle.Unpickler):
    """Loads Horovod's messages and Python's own types. Raises UnpicklingError if a pickle names anything else."""

    def find_class(self, module, name):
        if (module, name) not in MESSAGES:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a message of Horovod")
        return super().find_class(module, name)


def restrict(interface: str) -> None:
    """Lets the services that this process starts from now on listen on one interface, and load only their messages.

    Raises UserError if it has no IPv4 address.
    """
    find_port = network.find_port
    try:
        address = network.get_driver_ip([interface])
    except (KeyError, RuntimeError):
        raise UserError(f"--network-interfaces: {interface} has no IPv4 address on this machine") from None
    network.get_driver_ip = lambda interfaces: address  # what workers are told
    for module in (http_server, services):
        module.find_port = lambda start: find_port(lambda anywhere: start((address, anywhere[1])))
    for module in (codec, services):
        module.cloudpickle = SimpleNamespace(dumps=cloudpickle.dumps,
                                             loads=lambda content: Unpickler(io.BytesIO(content)).load())
