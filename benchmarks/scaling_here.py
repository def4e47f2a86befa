"""Compares the forecast of an all-reduce with Horovod's on this machine, over Gloo and over MPI.

    uv run python -m benchmarks.scaling_here [--output=here.json [--model=resnet20] [--transport=mpi]]

It times several sizes on two ranks and fits a straight line, which gives the cost of a message and of a byte. From that
line it forecasts the ring on 2 and on 4 ranks, and compares the forecast with measurements. With --output, it writes
the line of Gloo, or of --transport, and the speed of ResNet-50 and of each --model on one worker as a topology for
`launch.scaling` and `experiments.benchmark` with `--topology=here.json`. The forecast does not model ranks that share a
core.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import calibrate
from benchmarks.allreduce import LAUNCHERS
from launch.topology import Link, Network, cost

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
SIZES = (4_096, 65_536, 1_048_576, 4_194_304, 16_777_216)  # bytes
TRANSPORTS = {"gloo": LAUNCHERS["horovodrun"], "mpi": LAUNCHERS["mpirun"]}
MOVED = 2 * (2 - 1) / 2  # bytes that a rank of two sends per byte of the tensor


def exchange(rounds: int) -> None:
    """Measures all-reduce. Rank 0 prints bytes -> median seconds on the slowest rank."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tensors = {size: tf.ones([size // 4]) for size in SIZES}
    times = {size: [] for size in SIZES}
    for number in range(rounds + 1):
        for size, tensor in tensors.items():  # in turn, so that a drift of the machine affects all sizes alike
            hvd.allreduce(tf.zeros([1]), name="ready")
            begun = time.perf_counter()
            hvd.allreduce(tensor, name=f"of {size}").numpy()
            if number:  # the first round warms up
                times[size].append(time.perf_counter() - begun)
    slowest = hvd.allreduce(tf.constant([statistics.median(times[size]) for size in SIZES]), op=hvd.Max)
    if hvd.rank() == 0:
        print("MEASURED " + json.dumps(dict(zip(SIZES, slowest.numpy().tolist(), strict=True))), flush=True)


def compute(name: str, batches=(1, 2, 4, 8)) -> dict[int, float]:
    """Returns batch size -> images per second of a model's forward and backward pass on one worker."""
    import tensorflow as tf

    import model_zoo

    size, rates = model_zoo.MODELS[name].image_size, {}
    model = model_zoo.create_model(name, 1000, size)

    @tf.function(autograph=False, reduce_retracing=True)
    def step(images):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(images, training=True))
        return tape.gradient(loss, model.trainable_variables)

    for _ in range(5):  # in turn; the best of each, because other programs can only slow a step down
        for batch in batches:
            begun = time.perf_counter()
            step(tf.zeros([batch, size, size, 3]))[0].numpy()
            rates[batch] = max(rates.get(batch, 0.0), batch / (time.perf_counter() - begun))
    return rates


def measured(transport: str, ranks: int, rounds: int) -> dict[int, float]:
    launcher, *words = TRANSPORTS[transport]
    done = subprocess.run(
        [BIN / launcher, *words, "-np", str(ranks), sys.executable, "-m", "benchmarks.scaling_here", "--rank",
         f"--rounds={rounds}"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True,
        stdin=subprocess.DEVNULL, timeout=300)
    measured = [text.split("MEASURED ")[1] for text in done.stdout.splitlines() if "MEASURED " in text]
    if not measured:
        raise SystemExit(f"{transport} on {ranks} ranks: {done.stderr[-2000:]}")
    return {int(size): seconds for size, seconds in json.loads(measured[0]).items()}


def fitted(times: dict[int, float]) -> Link:
    """Returns the latency of one of the ring's two steps and the bandwidth, fitted to the times of two ranks."""
    fitted = calibrate.line({size: size / seconds for size, seconds in times.items()})
    return Link(fitted.fixed / 2, MOVED / fitted.per_image)  # an image is a byte here


def compare(transport: str, rounds: int) -> Link:
    link = None
    for ranks in (2, 4):
        times = measured(transport, ranks, rounds)
        link = link or fitted(times)
        network = Network(local_size=4, within=link, between=link)
        for size, seconds in times.items():
            forecast = cost(size, ranks, 1, network).seconds()
            print(f"{transport:5} {ranks} ranks {size:>11,} bytes: measured {1e3 * seconds:8.2f} ms, forecast "
                  f"{1e3 * forecast:8.2f} ms, {forecast / seconds - 1:+.0%}", flush=True)
    print(f"{transport:5} latency {1e6 * link.latency:,.0f} us, {link.bandwidth / 1e9:.2f} GB/s, from two ranks")
    return link


def described(link: Link, transport: str, models: list[str]) -> dict:
    """Returns a topology in which every node is like this machine."""
    measured = {"latency": link.latency, "bandwidth": link.bandwidth}
    here = f"measured by benchmarks.scaling_here: Horovod over {transport}, two ranks of this machine"
    described_here = {
        "cluster": f"nodes like {platform.node()}, with {os.cpu_count()} cores each", "local_size": os.cpu_count(),
        "within": measured, "between": measured, "overlap": 0.0,
        "calibration": {"rates": {"resnet50": compute("resnet50"),
                                  **{name: compute(name, (8, 16, 32, 64)) for name in models}}},
        "sources": {"local_size": "one worker per core", "within": here, "between": here + "; there is no second node",
                    "slowdown": "none: the link was measured on busy cores",
                    "overlap": "the cores are busy with one or the other",
                    "compute": "benchmarks.calibrate, from rates",
                    "rates": "measured: models on all cores, forward and backward pass"}}
    return described_here | calibrate.constants(calibrate.calibrated(described_here))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--transport", choices=TRANSPORTS, default="gloo")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if options.rank:
        exchange(options.rounds)
        return
    links = {transport: compare(transport, options.rounds) for transport in TRANSPORTS}
    if options.output:
        topology_here = described(links[options.transport], options.transport, options.model)
        options.output.write_text(json.dumps(topology_here, indent=1) + "\n")


if __name__ == "__main__":
    main()
