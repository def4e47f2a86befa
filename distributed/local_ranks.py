"""Exchanges values between the workers of a node before Horovod starts, over a socket that leaves no file behind."""
import contextlib
import json
import os
import socket
import struct
import time

from distributed.launcher import Launched

PATIENCE = 20.0  # seconds to wait until all workers of a node have started
JOBS = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_GLOO_RENDEZVOUS_PORT")  # environment variables that distinguish the jobs on a node
SENDER = struct.Struct("3i")  # process, user and group, as the kernel attaches them to a message
LARGEST = 1 << 20  # bytes of a message


def gather(value, worker: Launched) -> list | None:
    """Returns the list of all local ranks' values, in rank order, on each of them; None if they cannot connect.

    value: JSON-serializable. Each local rank has to call it. Messages of other users and malformed ones are ignored.
    """
    if worker.local_size == 1:
        return [value]
    job = [os.environ[name] for name in JOBS if name in os.environ]
    address = "\0" + "-".join(["bigbatch", str(os.getuid()), os.uname().nodename, *job])  # abstract: no file
    meet = _serve if worker.local_rank == 0 else _ask
    try:
        return meet(address, value, worker, time.monotonic() + PATIENCE) if job else None
    except OSError:
        return None


def _serve(address, value, worker, deadline):
    values, others = {0: value}, {}
    with _bound(address, deadline) as server:
        while len(values) < worker.local_size:
            match _receive(server, deadline):
                case [int(rank), theirs], sender if 0 < rank < worker.local_size:
                    values[rank], others[rank] = theirs, sender
        everyone = [values[rank] for rank in range(worker.local_size)]
        for sender in others.values():
            server.sendto(json.dumps(everyone).encode(), sender)
    return everyone


def _ask(address, value, worker, deadline):
    with _bound("", deadline) as client:
        while client.connect_ex(address):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        client.send(json.dumps([worker.local_rank, value]).encode())
        while True:
            match _receive(client, deadline):
                case [*everyone], _ if len(everyone) == worker.local_size:
                    return everyone


def _bound(address, deadline):
    """Returns a socket for messages, with the sender of each. An empty address becomes a free one."""
    messages = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)  # without connections, on which others could be silent
    messages.settimeout(deadline - time.monotonic())
    messages.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    messages.bind(address)
    return messages


def _receive(messages, deadline):
    """Returns this user's next message and its sender's address. Raises TimeoutError at the deadline."""
    while (left := deadline - time.monotonic()) > 0:
        messages.settimeout(left)
        text, attached, _, address = messages.recvmsg(LARGEST, socket.CMSG_SPACE(SENDER.size))
        user = [SENDER.unpack(data)[1] for level, kind, data in attached
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)]
        with contextlib.suppress(ValueError, RecursionError):
            if user == [os.getuid()]:
                return json.loads(text), address
    raise TimeoutError
