"""Heartbeats: if a worker stops answering, its name is printed within half a minute, and the job ends.

A frozen process, or one behind a pulled cable, blocks all others in a collective operation forever. Horovod's own stall
check runs in the same exchange and is blocked, too. Each worker therefore has a thread that sends a datagram to rank 0
each second, or every few seconds if there are thousands of workers, and rank 0 answers. A worker that hears nothing
from another for LIMIT seconds says so and exits. A worker that has never been heard, for example behind a firewall, is
not reported. A datagram begins with a digest that only the workers of the job can compute. Others are not read.

A worker whose reader or GPU hangs still sends heartbeats. They say at which update it is, what its main thread does,
and for how long that has not moved. Rank 0 names a worker that has waited for data for STALLED seconds, or one for
which others have waited so long, and says what it does. The job goes on.
"""
import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from common.activity import DATA, OTHERS, Activity, activity
from common.errors import complain
from common.threads import start_service
from distributed.world import World

LIMIT = 20.0  # seconds; less than the 30 after which Gloo gives up without naming a worker
INTERVAL = 1.0
PER_SECOND = 1000  # heartbeats that rank 0 answers at most; more workers send them less often
LARGEST = 2048  # bytes of a datagram
DIGEST = "sha256"
DIGEST_BYTES = 32
STALLED = 60.0  # seconds without progress after which rank 0 names the worker that holds up the others
MOST_NAMED = 8  # workers in a message


@dataclass(frozen=True)
class Meeting:
    """Where and how to reach rank 0."""

    addresses: tuple[str, ...]
    port: int
    key: bytes  # the secret that signs this job's datagrams


@dataclass(frozen=True)
class Report:
    """What a worker has reported about itself."""

    host: str
    pid: int
    step: int
    does: str  # name of what its main thread does, as in common.activity
    seconds: float  # for which the main thread has made no progress


class Heartbeat:
    """This worker's heartbeat thread.

    end: called with a message when another worker has been silent for LIMIT seconds. own: what this worker does.
    """

    def __init__(self, world: World, end=None, own: Activity = activity):
        self._end = end or _end
        self._activity = own
        self._size = world.size
        self._reports = {}
        self._told = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._socket.settimeout(INTERVAL / 4)
        own = Meeting(("127.0.0.1", *_addresses()), self._socket.getsockname()[1], secrets.token_bytes(16))
        self._meeting = world.broadcast(own, "heartbeat")
        self._interval = max(INTERVAL, world.size / PER_SECOND)
        self._rank = world.rank
        self._heard = {}
        self._stopping = threading.Event()
        self._thread = start_service("heartbeat", self._beat)

    def stop(self) -> None:
        """Stops the heartbeat thread."""
        self._stopping.set()
        if self._thread.is_alive():
            with contextlib.suppress(OSError):  # the thread waits for a datagram
                self._socket.sendto(b"", ("127.0.0.1", self._socket.getsockname()[1]))
            self._thread.join()
        self._socket.close()

    def _beat(self):
        own = (socket.gethostname(), os.getpid())
        word = b""
        due = time.monotonic()
        while not self._stopping.is_set():
            self._receive(word)
            now = time.monotonic()
            if now < due:
                continue
            if now - due > LIMIT / 4:  # this process was suspended, not the others
                self._heard = {rank: (now, *others) for rank, (_, *others) in self._heard.items()}
                self._activity.forget()
            due = now + self._interval
            does, seconds = self._activity.look()
            self._reports[self._rank] = report = Report(*own, self._activity.step, does, seconds)
            word = signed(self._meeting.key, json.dumps({"rank": self._rank, **vars(report)}).encode())
            if not self._rank:
                self._name_stalled()
            for address in self._targets() if self._rank else ():
                self._send(word, (address, self._meeting.port))
            for rank, (last, host, pid, _) in self._heard.items():
                if now - last > LIMIT:
                    self._end(f"worker {rank} ({host}, process {pid}) has not answered for {LIMIT:.0f} s")
                    return

    def _targets(self):
        """Returns the address that rank 0 has answered from; before an answer, all its addresses."""
        return [self._heard[0][3]] if 0 in self._heard else self._meeting.addresses

    def _receive(self, word):
        try:
            data, sender = self._socket.recvfrom(LARGEST)
        except OSError:  # no datagram in time
            return
        if (message := verified(self._meeting.key, data)) is not None:
            heard = json.loads(message)
            rank = heard.pop("rank")
            self._reports[rank] = report = Report(**heard)
            self._heard[rank] = time.monotonic(), report.host, report.pid, sender[0]
            if not self._rank:
                self._send(word, sender)

    def _name_stalled(self):
        """Says once per stall which workers do not move, and what they do."""
        still = {rank: report for rank, report in self._reports.items() if report.seconds >= STALLED}
        stalled = [rank for rank, report in still.items() if report.does == DATA]
        if not stalled and any(report.does == OTHERS for report in still.values()):
            stalled = [rank for rank, report in still.items() if report.does != OTHERS]
        if not stalled and len(still) == self._size > 1 and {report.does for report in still.values()} == {OTHERS}:
            stalled = [*still]
        if stalled and not self._told:
            named = "; ".join(f"worker {rank} ({still[rank].host}, process {still[rank].pid}) is {still[rank].does}"
                              for rank in sorted(stalled)[:MOST_NAMED])
            more = f"; and {len(stalled) - MOST_NAMED} more workers" if len(stalled) > MOST_NAMED else ""
            complain(f"no progress for {STALLED:.0f} s at step {still[stalled[0]].step}: {named}{more}")
        self._told = bool(stalled)

    def _send(self, word, target):
        with contextlib.suppress(OSError):  # the network is down: the other side notices the silence
            self._socket.sendto(word, target)


def signed(key: bytes, message: bytes) -> bytes:
    """Returns the datagram of a message."""
    return hmac.digest(key, message, DIGEST) + message


def verified(key: bytes, data: bytes) -> bytes | None:
    """Returns the message of a datagram that this key has signed, or None."""
    digest, message = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return message if hmac.compare_digest(digest, hmac.digest(key, message, DIGEST)) else None


@contextlib.contextmanager
def beating(world: World, ends_process: bool) -> Iterator[None]:
    """Sends heartbeats while the block runs.

    ends_process: whether a silent worker ends this process. If not, the silence is printed once.
    """
    heartbeat = Heartbeat(world, None if ends_process else complain)
    try:
        yield
    finally:
        heartbeat.stop()


def _addresses() -> tuple[str, ...]:
    """Returns the IPv4 addresses at which other hosts may reach this one."""
    return tuple(address.address for addresses in psutil.net_if_addrs().values() for address in addresses
                 if address.family == socket.AF_INET and not address.address.startswith("127."))


def _end(message) -> None:
    """Ends this process, whose main thread may be blocked where no exception reaches it."""
    complain(f"{message}; the job ends")
    os._exit(1)
