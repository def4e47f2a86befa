"""Measures reading from a server: how long a device waits for its images, and what is fetched.

    sudo uv run --group benchmark python -m benchmarks.remote [--photos=4000] [--seconds=12] [--output=FILE]

Needs root, iproute2 and nginx with its echo module (Debian: nginx-light, libnginx-mod-http-echo). nginx runs in a
network namespace of its own. The kernel (tc tbf) limits what it sends, and it answers each request after a fixed time.
Between it and the readers of benchmarks.peers.far (bigbatch, DALI's own s3://, tf.data) stand S3 addresses; tf.data
fetches the same files over http://. The device computes at a fixed speed, which needs 60 % of the bandwidth, at most
400 images/s. The photographs are those of benchmarks.photos, in shards of 256.

The first table has a window that holds nothing of an earlier epoch yet: the fraction of the time that the device
waits, the seconds to the first batch, and requests per 64 samples fetched. The second reads three epochs with windows
of different sizes, and compares what is fetched, in sizes of the set, with 1 + 2 (1 - window / set).
"""
import argparse
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import photos
from benchmarks.input_pipeline import prepare
from data.dataset import Split, open_dataset

ROOT = Path(__file__).parents[1]
NAME, NEAR, FAR, PORT = "bigbatch-far", "10.213.7.1", "10.213.7.2", 8099
MEGABYTES, LATENCIES = (20, 50, 200), (0.001, 0.02, 0.1)  # per second; seconds
WINDOWS = (1.0, 0.5, 0.25)
READERS = ("bigbatch", "dali", "tf_data")
BATCH, BLOCK, SHARD, FASTEST, USED, EPOCHS, SHUFFLED = 64, 64, 256, 400.0, 0.6, 3, 1024
CONFIGURATION = """
load_module /usr/lib/nginx/modules/ngx_http_echo_module.so;
user root; daemon off; pid {place}/pid; error_log {place}/errors;
events {{ worker_connections 512; }}
http {{
  log_format asked "$request_method $uri $body_bytes_sent";
  access_log {place}/asked asked;
  sendfile on; keepalive_requests 1000000;
  server {{
    listen {address};
    location / {{ echo_sleep {latency}; echo_exec /files$uri; }}
    location /files/ {{ internal; alias {folder}/; }}
  }}
}}
"""


class Server:
    """nginx in a network namespace, with a limited link. asked: its log."""

    def __init__(self, folder: Path, place: Path):
        self._folder, self._place = folder, place
        self.asked = place / "asked"

    @contextlib.contextmanager
    def serving(self, megabytes: float, latency: float) -> Iterator[None]:
        """Serves the folder with this bandwidth in MB/s, and this time in s to each answer."""
        rate = f"{megabytes * 8:g}mbit"
        call("tc", "-n", NAME, "qdisc", "replace", "dev", "far", "root", "tbf", "rate", rate, "burst", "256kb",
             "latency", "100ms")
        configuration = self._place / "nginx.conf"
        configuration.write_text(CONFIGURATION.format(place=self._place, folder=self._folder, latency=latency,
                                                      address=f"{FAR}:{PORT}"))
        self.asked.write_text("")
        nginx = subprocess.Popen(["ip", "netns", "exec", NAME, "nginx", "-c", str(configuration)])
        time.sleep(0.5)
        try:
            yield
        finally:
            nginx.terminate()
            nginx.wait()

    def fetched(self) -> tuple[int, int]:
        """Returns the number of requests for training images, and their bytes."""
        lines = [line.split() for line in self.asked.read_text().splitlines()]
        sizes = [int(size) for method, path, size in lines if method == "GET" and "/train-" in path
                 and path.endswith(".tfrecord")]
        return len(sizes), sum(sizes)


@contextlib.contextmanager
def linked() -> Iterator[None]:
    """Makes the namespace and a cable to it."""
    subprocess.run(["ip", "netns", "del", NAME], capture_output=True)  # left by a killed run
    call("ip", "netns", "add", NAME)
    try:
        call("ip", "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", NAME)
        call("ip", "addr", "add", f"{NEAR}/30", "dev", "near")
        call("ip", "link", "set", "near", "up")
        call("ip", "-n", NAME, "addr", "add", f"{FAR}/30", "dev", "far")
        call("ip", "-n", NAME, "link", "set", "far", "up")
        yield
    finally:
        call("ip", "netns", "del", NAME)


def call(*command: str) -> None:
    subprocess.run(command, check=True)


def read(reader: str, rate: float, fraction: float, seconds: float = math.inf, images: float = math.inf) -> dict:
    """Runs a reader of benchmarks.peers.far in a process of its own; returns what it prints."""
    server = f"http://{FAR}:{PORT}"
    bucket = f"{server}/bucket/set" if reader == "tf_data" else "s3://bucket/set"
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "3", "AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none", "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    numbers = map(str, (BATCH, rate, seconds, images, fraction))
    done = subprocess.run([sys.executable, "-m", "benchmarks.peers.far", reader, bucket, *numbers], cwd=ROOT,
                          env=environment, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{reader} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def readers(server: Server, train: Split, seconds: float) -> Iterator[dict]:
    """Yields the rows of the first table."""
    mean = stored(train) / train.samples
    for megabytes in MEGABYTES:
        rate = min(FASTEST, USED * megabytes * 1e6 / mean)
        for latency in LATENCIES:
            for reader in READERS:
                with server.serving(megabytes, latency):
                    measured = read(reader, rate, 1.0, seconds, 0.7 * train.samples)
                requests, fetched = server.fetched()
                yield {"megabytes_per_second": megabytes, "latency": latency, "reader": reader,
                       "images_per_second": round(rate), "waited": round(measured["waited"], 4),
                       "first": round(measured["first"], 2),
                       "requests_per_block": round(requests * BLOCK / (fetched / mean), 2)}


def windows(server: Server, train: Split) -> Iterator[dict]:
    """Yields the rows of the second table."""
    for window in WINDOWS:
        with server.serving(MEGABYTES[-1], LATENCIES[0]):
            read("bigbatch", FASTEST, window, images=EPOCHS * train.samples - SHUFFLED - 2 * BATCH)
        requests, fetched = server.fetched()
        fetched /= stored(train)
        yield {"window": window, "epochs": EPOCHS, "fetched": round(fetched, 3),
               "least": 1 + (EPOCHS - 1) * (1 - window),
               "requests_per_block": round(requests * BLOCK / fetched / train.samples, 2)}


def stored(split: Split) -> int:
    """Returns the bytes of a split's records."""
    return sum(int(entries[:, 1].sum()) for entries in split.entries)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--photos", type=int, default=4000, help="number of photographs")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a measurement, at most")
    parser.add_argument("--output", type=Path, help="file for the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, linked():
        place = Path(scratch)
        images = photos.make(place / "photos", options.photos)
        (place / "served/bucket").mkdir(parents=True)
        train = open_dataset(prepare(images, place / "served/bucket/set", f"--shard_samples={SHARD}")).train
        server, result = Server(place / "served", place), []
        for row in itertools.chain(readers(server, train, options.seconds), windows(server, train)):
            print(json.dumps(row), flush=True)
            result.append(row)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
