"""Measures what rank 0 pays for 3,456 workers, and each worker for ImageNet: heartbeats, file names, sample order.

    uv run python -m benchmarks.many_workers

It prints the processor time that rank 0 needs for its heartbeats, next to that of as many bare datagrams that are
received and answered; the bytes of a folder's listing as it is sent, next to those of the names; and the seconds in
which a worker computes the order of an epoch, next to those of a bare permutation.
"""
import contextlib
import json
import pickle
import socket
import subprocess
import sys
import time

import numpy as np

from benchmarks.groups import CLASSES, SAMPLES, imagenet
from common.files import as_json
from data import order
from data.formats.folder import Listing
from distributed.heartbeat import LARGEST, PER_SECOND, Heartbeat

WORKERS, SECONDS = 3_456, 10
SENDER = """
import json, socket, sys, time

word, port, workers, rate, seconds = json.loads(sys.argv[1])
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.setblocking(False)
start = time.monotonic()
for number in range(rate * seconds):
    beat = {"word": word, "rank": 1 + number % (workers - 1), "host": "node", "pid": 7}
    own.sendto(json.dumps(beat).encode(), ("127.0.0.1", port))
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


def cpu_seconds(port: int, word: str, work) -> float:
    """Returns the processor seconds of this process while another sends PER_SECOND heartbeats to a port.

    word: that of the job. work: called with the sending process, until it has ended.
    """
    arguments = json.dumps([word, port, WORKERS, PER_SECOND, SECONDS])
    sender = subprocess.Popen([sys.executable, "-c", SENDER, arguments])
    before = time.process_time()
    work(sender)
    spent = time.process_time() - before
    assert sender.wait() == 0
    return spent


def heartbeats() -> dict:
    heartbeat = Heartbeat(Rank0(), print)
    meeting = heartbeat._meeting
    ours = cpu_seconds(meeting.port, meeting.word, lambda sender: sender.wait())
    heartbeat.stop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bare:
        bare.bind(("127.0.0.1", 0))
        bare.settimeout(0.25)

        def answer(sender):
            while sender.poll() is None:
                with contextlib.suppress(OSError):
                    bare.sendto(*bare.recvfrom(LARGEST))

        theirs = cpu_seconds(bare.getsockname()[1], "", answer)
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


if __name__ == "__main__":
    for measure in (heartbeats, listing, epoch_order):
        print(as_json({name: float(f"{value:.3g}") for name, value in measure().items()}), flush=True)
