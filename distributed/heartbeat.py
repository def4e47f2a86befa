"""Heartbeats: a worker that has stopped answering is named within half a minute, and the job ends.

A frozen process, or one behind a pulled cable, holds all others inside a collective operation for ever; Horovod's own
stall check runs in that same exchange and is held, too. So each worker has a thread that sends a datagram a second to
rank 0, which answers; whoever misses the other for LIMIT seconds says so and ends the process. A worker that has never
been heard (a firewall between) is not missed.
"""
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from common.errors import complain
from distributed.world import World

LIMIT = 20.0  # seconds; below the 30 after which Gloo gives up without a name
INTERVAL = 1.0
LARGEST = 2048  # bytes of a datagram


@dataclass(frozen=True)
class Meeting:
    """Where rank 0 listens, and the word without which a datagram is not ours."""

    addresses: tuple[str, ...]
    port: int
    word: str


class Heartbeat:
    """This worker's thread. end: what is called, with a message, when another has fallen silent."""

    def __init__(self, world: World, end=None):
        self._end = end or _end
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._socket.settimeout(INTERVAL / 4)
        own = Meeting(("127.0.0.1", *_addresses()), self._socket.getsockname()[1], secrets.token_hex(8))
        self._meeting = world.broadcast(own, "heartbeat")
        self._rank, self._heard, self._stopping = world.rank, {}, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        if world.size > 1:
            self._thread.start()

    def stop(self) -> None:
        """Stops the heartbeat thread."""
        self._stopping.set()
        if self._thread.is_alive():
            with contextlib.suppress(OSError):  # the thread waits for a datagram
                self._socket.sendto(b"", ("127.0.0.1", self._socket.getsockname()[1]))
            self._thread.join()
        self._socket.close()

    def _beat(self):
        word = {"word": self._meeting.word, "rank": self._rank, "host": socket.gethostname(), "pid": os.getpid()}
        due = time.monotonic()
        while not self._stopping.is_set():
            self._listen(word)
            now = time.monotonic()
            if now < due:
                continue
            if now - due > LIMIT / 4:  # it was this process that stood still
                self._heard = {rank: (now, *others) for rank, (_, *others) in self._heard.items()}
            due = now + INTERVAL
            for address in self._targets() if self._rank else ():
                self._send(word, (address, self._meeting.port))
            for rank, (last, host, pid, _) in self._heard.items():
                if now - last > LIMIT:
                    self._end(f"worker {rank} ({host}, process {pid}) has not answered for {LIMIT:.0f} s: the job ends")
                    return

    def _targets(self):
        """Where rank 0 has answered from; before that, wherever it may be."""
        return [self._heard[0][3]] if 0 in self._heard else self._meeting.addresses

    def _listen(self, word):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # nothing came, or nothing of ours
            data, sender = self._socket.recvfrom(LARGEST)
            heard = json.loads(data)
            if heard["word"] == self._meeting.word:
                self._heard[int(heard["rank"])] = time.monotonic(), heard["host"], heard["pid"], sender[0]
                if not self._rank:
                    self._send(word, sender)

    def _send(self, word, target):
        with contextlib.suppress(OSError):  # the network is not there: silence speaks for itself
            self._socket.sendto(json.dumps(word).encode(), target)


@contextlib.contextmanager
def beating(world: World, ends_process: bool) -> Iterator[None]:
    """Heartbeats as long as the block runs. ends_process: when a worker is silent; otherwise it is said, once."""
    heartbeat = Heartbeat(world, None if ends_process else complain)
    try:
        yield
    finally:
        heartbeat.stop()


def _addresses() -> tuple[str, ...]:
    """The IPv4 addresses under which other hosts may reach this one."""
    return tuple(address.address for addresses in psutil.net_if_addrs().values() for address in addresses
                 if address.family == socket.AF_INET and not address.address.startswith("127."))


def _end(message) -> None:
    """Ends this process, whose main thread may be held where no exception reaches it."""
    complain(message)
    os._exit(1)
