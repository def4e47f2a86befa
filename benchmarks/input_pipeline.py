"""Compares the input pipeline with tf.data, PyTorch and the decoder alone, and training on real and synthetic images.

    uv run --group benchmark python -m benchmarks.input_pipeline [--rounds=5] [--torch_python=PATH] [--output=FILE]
    uv run --group benchmark python -m benchmarks.input_pipeline --rand_augment
    uv run --group benchmark python -m benchmarks.input_pipeline --cifar10

The first part reads photographs of about 500x375 pixels (benchmarks.photos). Each candidate crops 8 to 100 % of the
area, resizes it to 224 pixels, flips it at random, and delivers shuffled batches of 128 uint8 images and labels,
on two cores:

    bigbatch    data.feed.Feed.train, batches arriving in TensorFlow; TFRecord
    tf.data     fused decoding and cropping, AUTOTUNE, batches of TensorFlow; TFRecord
    PyTorch     DataLoader, two workers, Pillow; files
    decoder     the limit: libjpeg-turbo (simplejpeg), two threads, whole images in memory, decoding only

Pillow antialiases when it shrinks an image, as torchvision does. bigbatch and the usual tf.data recipe do not. Each
candidate is a process, which is stopped during the turns of the others. The first second of a turn does not count for
the images per second. The processor seconds are those of all threads and processes of a candidate. The output shows
medians over the rounds, and the median of the ratios per round. PyTorch is not a dependency: run `pip
install torch==2.13.0 pillow numpy` in an environment of your own, and give its interpreter as --torch_python.

With --rand_augment, the candidates are bigbatch and tf.data, each with RandAugment's operations and without them, and
bigbatch with --augmentation=nnabla. tf.data has five of the operations, which are Keras's layers, and bigbatch all
fifteen.

With --cifar10, the candidates are bigbatch with each --augmentation of SMALL, on CIFAR-10 (data.sources.cifar10) at its
own 32 pixels.

The second part, which --no_train omits, runs train.py on real images and on synthetic ones of the same size in turn. It
takes the median of the images per second of all epochs except the first, which includes compilation. It trains
ResNet-20 on `digits`, and ResNet-18 at 64 pixels on the photographs, as they are and after data.prepare
--resize_shorter=96.
"""
import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import photos
from common import processor
from data.named import built_in

ROOT = Path(__file__).parents[1]
IMAGE_SIZE, BATCH, CORES = 224, 128, 2
WANTED = {"PyTorch": 2.0, "decoder": 0.5}  # times the rate of each
WANTED_COST = {("bigbatch", "tf.data"): 0.95, ("bigbatch, RandAugment", "tf.data, RandAugment"): 0.9}  # times its cost
WANTED_TRAIN = 0.97
OPERATIONS = "m6-n2-mstd0.5-inc1"
SMALL_SIZE = 32
SMALL = ("none", "caffe", "pad_crop_flip", "reflect_crop_alternate_flip")


class Turn(NamedTuple):
    """rate: images per second. cost: processor seconds per 1,000 images."""

    rate: float
    cost: float


class Peer:
    """A process of benchmarks.peers, with its workers. It is stopped between its turns, so that it fills no queues."""

    def __init__(self, stack, source, module, *words, size=IMAGE_SIZE, python=sys.executable):
        command = [python, "-m", f"benchmarks.peers.{module}", str(source), str(size), str(BATCH), str(CORES), *words]
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        stack.callback(self._signal, signal.SIGKILL)
        self._answer("ready")
        self._signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> Turn:
        """Runs for some seconds."""
        before = self._processor_seconds()
        self._signal(signal.SIGCONT)
        print(seconds, file=self._process.stdin, flush=True)
        rate, images = map(float, self._answer().split())
        self._signal(signal.SIGSTOP)
        return Turn(rate, 1000 * (self._processor_seconds() - before) / images)

    def _processor_seconds(self) -> float:
        process = psutil.Process(self._process.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))

    def _signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, wanted=None) -> str:
        line = self._process.stdout.readline().strip()
        if not line or wanted not in (None, line):
            raise SystemExit(f"benchmarks.input_pipeline: {' '.join(self._process.args)} failed")
        return line


def pipelines(dataset: Path, folder: Path, options) -> dict[str, list[Turn]]:
    """Returns the turns of each peer."""
    with contextlib.ExitStack() as stack:
        if options.cifar10:
            peers = {f"bigbatch, {name}": Peer(stack, dataset, "bigbatch", "none", name, size=SMALL_SIZE)
                     for name in SMALL}
        else:
            peers = {"bigbatch": Peer(stack, dataset, "bigbatch"), "tf.data": Peer(stack, dataset, "tf_data")}
        if options.rand_augment:
            peers = {f"{name}, RandAugment": Peer(stack, dataset, module, OPERATIONS) for name, module in (
                ("bigbatch", "bigbatch"), ("tf.data", "tf_data"))} | peers
            peers["bigbatch, nnabla"] = Peer(stack, dataset, "bigbatch", "none", "nnabla")
        elif not options.cifar10:
            peers |= {"PyTorch": Peer(stack, folder, "torch_loader", python=options.torch_python),
                      "decoder": Peer(stack, folder, "jpeg_limit")}
        turns = {name: [] for name in peers}
        for _ in range(options.rounds):
            for name, peer in peers.items():
                turns[name].append(peer.turn(options.seconds))
    return turns


def training(digits: str, large: Path, small: Path, options) -> dict[str, dict[str, list[float]]]:
    """Returns the images per second of training on real and on synthetic images in each round."""
    resnet18 = ("--model=resnet18", "--image_size=64", "--augmentation=crop_flip", "--micro_batch_size=64")
    resnet20 = ("--model=resnet20", "--image_size=32", "--augmentation=crop", "--micro_batch_size=128")
    runs = {"ResNet-20, digits": (digits, 1437, resnet20),
            "ResNet-18 at 64 pixels, photographs": (large, None, resnet18),
            "ResNet-18 at 64 pixels, --resize_shorter=96": (small, None, resnet18)}
    rates = {name: {"real": [], "synthetic": []} for name in runs}
    for _ in range(options.train_rounds):
        for name, (data_dir, samples, flags) in runs.items():
            samples = samples or json.loads((data_dir / "dataset.json").read_text())["train"]["samples"]
            for kind, source in (("real", data_dir), ("synthetic", f"synthetic:{samples}")):
                rates[name][kind].append(train(source, *flags))
    return rates


def train(data_dir, *flags: str) -> float:
    """Trains and returns images per second, the median of all epochs except the first."""
    with tempfile.TemporaryDirectory(prefix="bigbatch-benchmark-") as folder:
        subprocess.run([sys.executable, "train.py", f"--data_dir={data_dir}", "--batch_size=128", "--epochs=4",
                        "--checkpoint_every=100", f"--output_dir={folder}", *flags], cwd=ROOT, check=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        rows = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(row)["images_per_second"] for row in rows[1:])


def prepare(source: Path, output: Path, *flags: str) -> Path:
    subprocess.run([sys.executable, "-m", "data.prepare", f"--source={source}", f"--output={output}",
                    "--validation_fraction=0.06", *flags], cwd=ROOT, check=True, capture_output=True)
    return output


def ratio(ones: list[float], others: list[float]) -> float:
    return statistics.median(rate / bar for rate, bar in zip(ones, others, strict=True))


def show(turns: dict[str, list[Turn]], trained: dict, image_size: int) -> dict:
    """Prints the medians and ratios; returns them with the figures of each round."""
    rates, costs = ({name: [getattr(turn, field) for turn in own] for name, own in turns.items()}
                    for field in Turn._fields)
    ours = [name for name in turns if name.startswith("bigbatch")]
    ratios = {one: {other: {"rate": ratio(rates[one], rates[other]), "cost": ratio(costs[one], costs[other])}
                    for other in turns if other != one} for one in ours}
    print(f"{image_size} pixels, batch {BATCH}, {CORES} cores, {processor.name()}\n"
          f"{'':38s}{'images/s':>9s}{'processor seconds per 1,000 images':>37s}")
    for name in turns:
        print(f"{name:38s}{statistics.median(rates[name]):9,.0f}{statistics.median(costs[name]):37.2f}")
    for one, others in ratios.items():
        for other, found in others.items():
            targets = [f"target {kind}: {value:g}" for kind, value in (
                ("rate", WANTED.get(other) if one == "bigbatch" else None), ("cost", WANTED_COST.get((one, other))))
                if value]
            print(f"{one} / {other}: rate {found['rate']:.2f}, cost {found['cost']:.2f}", *targets, sep="   ")
    for name, kinds in trained.items():
        ratios[name] = ratio(kinds["real"], kinds["synthetic"])
        print(f"{name:45s}{statistics.median(kinds['real']):7,.0f} real, {statistics.median(kinds['synthetic']):7,.0f} "
              f"synthetic: {ratios[name]:.3f} (target: {WANTED_TRAIN})")
    return {"processor": processor.name(), "rates": rates, "costs": costs, "training": trained, "ratios": ratios}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each turn, in seconds")
    parser.add_argument("--train_rounds", type=int, default=2)
    parser.add_argument("--no_train", action="store_true")
    parser.add_argument("--rand_augment", action="store_true", help="RandAugment and nnabla instead of training")
    parser.add_argument("--cifar10", action="store_true", help="augmentations of small images instead of training")
    parser.add_argument("--torch_python", default=sys.executable, help="Python interpreter with torch and Pillow")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "bigbatch-photos")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # the peers inherit it
    trained = {}
    if options.cifar10:
        turns = pipelines(built_in("cifar10"), None, options)
    else:
        folder = photos.make(options.folder / str(options.photos), options.photos)
        with tempfile.TemporaryDirectory(prefix="bigbatch-benchmark-") as scratch:
            large = prepare(folder, Path(scratch) / "large")
            turns = pipelines(large, folder, options)
            if not options.no_train and not options.rand_augment:
                small = prepare(folder, Path(scratch) / "small", "--resize_shorter=96")
                trained = training("digits", large, small, options)
    result = show(turns, trained, SMALL_SIZE if options.cifar10 else IMAGE_SIZE)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
