"""Measures what rank 0 pays for 3,456 workers, and each worker for ImageNet: heartbeats, file names, sample order.

It also measures what each worker pays when the objects of 1,024 and of 4,096 workers are gathered.

    uv run python -m benchmarks.many_workers

It prints the processor time that rank 0 needs for its heartbeats, next to that of as many bare datagrams that are
received and answered; the bytes of a folder's listing as it is sent, next to those of the names; the seconds in which
a worker computes the order of an epoch, next to those of a bare permutation; and the seconds in which a worker takes
apart what an all-gather has brought, next to those of Horovod's allgather_object.
"""
import contextlib
import functools
import json
import pickle
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import horovod.tensorflow as hvd
import numpy as np
from horovod.tensorflow import functions

from benchmarks.groups import CLASSES, SAMPLES, imagenet
from common.files import as_json
from data import order
from data.class_folders import Listing
from distributed.heartbeat import LARGEST, PER_SECOND, Heartbeat
from distributed.world import World

WORKERS, SECONDS = 3_456, 10
SENDER = """
import hmac, json, socket, sys, time

key, port, workers, rate, seconds = json.loads(sys.argv[1])
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.setblocking(False)
start = time.monotonic()
for number in range(rate * seconds):
    beat = json.dumps({"rank": 1 + number % (workers - 1), "host": "node", "pid": 7, "step": 9,
                       "does": "waiting for the other workers", "seconds": 0.25}).encode()
    own.sendto(hmac.digest(bytes.fromhex(key), beat, "sha256") + beat, ("127.0.0.1", port))
    try:
        while True:
            own.recvfrom(2048)
    except OSError:
        pass
    time.sleep(max(0, start + number / rate - time.monotonic()))
"""


class Rank0:
    """Of a world of WORKERS."""

    size, rank = WORKERS, 0

    def broadcast(self, value, name):
        return value


def cpu_seconds(port: int, key: bytes, work) -> float:
    """Returns the processor seconds of this process while another sends PER_SECOND heartbeats to a port.

    key: that of the job. work: called with the sending process, until it has ended.
    """
    arguments = json.dumps([key.hex(), port, WORKERS, PER_SECOND, SECONDS])
    sender = subprocess.Popen([sys.executable, "-c", SENDER, arguments])
    before = time.process_time()
    work(sender)
    spent = time.process_time() - before
    assert sender.wait() == 0
    return spent


def heartbeats() -> dict:
    heartbeat = Heartbeat(Rank0(), print)
    meeting = heartbeat._meeting
    ours = cpu_seconds(meeting.port, meeting.key, lambda sender: sender.wait())
    heartbeat.stop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bare:
        bare.bind(("127.0.0.1", 0))
        bare.settimeout(0.25)

        def answer(sender):
            while sender.poll() is None:
                with contextlib.suppress(OSError):
                    bare.sendto(*bare.recvfrom(LARGEST))

        theirs = cpu_seconds(bare.getsockname()[1], b"", answer)
    return {"heartbeats_cpu": ours / SECONDS, "over_bare_datagrams": ours / theirs}


def listing() -> dict:
    """Of file names as ImageNet's training set has them."""
    names = Listing.__new__(Listing)
    counts = np.bincount(np.arange(SAMPLES) * CLASSES // SAMPLES)
    random = np.random.default_rng(1)
    synsets = [f"n{number:08d}" for number in np.sort(random.choice(10**8, CLASSES, replace=False))]
    names.files = [f"{synset}/{synset}_{image}.JPEG" for synset, count in zip(synsets, counts, strict=True)
                   for image in np.sort(random.choice(30_000, count, replace=False))]
    names.labels = np.repeat(np.arange(CLASSES), counts)
    sent = len(pickle.dumps(names))
    return {"listing_mb": sent / 1e6, "over_the_names": sent / len("\0".join(names.files))}


def epoch_order() -> dict:
    split, ours, theirs = imagenet(), [], []
    for epoch in range(5):
        begin = time.perf_counter()
        order.permutation(split, 1, epoch)
        middle = time.perf_counter()
        np.random.default_rng(epoch).permutation(SAMPLES)
        ours.append(middle - begin)
        theirs.append(time.perf_counter() - middle)
    return {"order_seconds": min(ours), "over_a_permutation": min(ours) / min(theirs)}


def gathering(workers: int) -> dict:
    """Of what each worker says at the start. No byte is exchanged: all workers say the same."""
    def allgather(tensor, name, process_set=None):
        gathered = np.tile(tensor.numpy(), workers)
        return SimpleNamespace(numpy=lambda: gathered)

    hvd.allgather = functions.allgather = allgather
    all_workers = SimpleNamespace(size=lambda: workers)
    value, ours, theirs = ((0, -1), "/runs/a-folder", "node0123"), [], []
    for _ in range(3):
        begin = time.perf_counter()
        World(size=workers).gather(value, "start")
        middle = time.perf_counter()
        hvd.allgather_object(value, name="start", process_set=all_workers)
        ours.append(middle - begin)
        theirs.append(time.perf_counter() - middle)
    return {f"gather_{workers}_seconds": min(ours), f"horovods_gather_{workers}_seconds": min(theirs)}


if __name__ == "__main__":
    for measure in (heartbeats, listing, epoch_order, functools.partial(gathering, 1024),
                    functools.partial(gathering, 4096)):
        print(as_json({name: float(f"{value:.3g}") for name, value in measure().items()}), flush=True)
