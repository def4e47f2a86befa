"""Measures the stages of experiments.benchmark in turn, with the components that train.py uses."""
import contextlib
import io
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import tensorflow as tf

from common.errors import UserError, reason
from common.files import scratch_folder
from data import augmentation, order, pipeline, synthetic
from data.damage import input_reason
from data.dataset import Split
from data.feed import Batches
from distributed.exchange import GradientExchange
from distributed.world import check_gpus, start
from reporting import stages as report
from training import build
from training.settings import Launch, Recipe
from training.step import Totals, make_train_step

ROUNDS = 5
MOST_SAMPLES = 65_536
AHEAD = 4  # batches; more than DALI prefetches while the other stages have their turns
PARTS = ("read", "decode", "augment")


@dataclass
class Stage:
    """A stage to measure. `batch` processes a batch. `wait` returns when the device has finished it.

    ahead: number of batches that may be prefetched. batches: names a record that cannot be read. rates: images per
    second of each turn.
    """

    name: str
    threads: int | None
    batch: Callable[[], object]
    batches: Batches | None = None
    wait: Callable[[], object] = lambda: None
    ahead: int = AHEAD
    done: int = 0
    rates: list[float] = field(default_factory=list)

    def turn(self, batch_size: int, seconds: float) -> None:
        """Consumes the prefetched batches, then measures for some seconds, but at least one batch."""
        quiet()
        self._run(seconds, self.ahead)
        begun, before = time.perf_counter(), self.done
        self._run(seconds, None)
        self.rates.append((self.done - before) * batch_size / (time.perf_counter() - begun))

    def _run(self, seconds, most):
        end, last = time.perf_counter() + seconds, None if most is None else self.done + most
        while self.done != last:
            self.batch()
            self.done += 1
            if time.perf_counter() >= end:
                break
        self.wait()


def quiet(longest: float = 5.0) -> None:
    """Waits until the other stages' pipelines have filled their queues and this process's threads are idle."""
    end, used = time.perf_counter() + longest, -1.0
    while time.perf_counter() < end and time.process_time() - used > 0.005:
        used = time.process_time()
        time.sleep(0.02)


def measure(recipe: Recipe, launch: Launch, options, dataset) -> dict:
    """Returns the content of --json. options: those of experiments.benchmark."""
    build.set_compiler(launch)
    world, batch_size = start(recipe.seed, device=launch.device), options.batch_size
    check_gpus(world, launch.device_policy)
    device, threads = build.dali_device(launch.dali_device, world), options.dali_threads or (world.cores,)
    with contextlib.ExitStack() as stack:
        with errors_in_one_line():
            stages, size = build_stages(recipe, launch, dataset, world, threads, batch_size, stack)
        for number in range(1 + ROUNDS):  # the first turn compiles
            for stage in stages:
                with errors_in_one_line(stage, batch_size):
                    stage.turn(batch_size, options.seconds / ROUNDS if number else 0)
        rows = [row(stage, size) for stage in stages]
    result = {
        "stages": sorted(rows, key=lambda row: list(report.TITLES).index(row["name"])), "threads": list(threads),
        "cores": world.cores, "gpu": world.gpu is not None, "dali_device": device, "batch_size": batch_size,
        "format": dataset.format, "image_bytes": size, "shorter_side": shorter_side(dataset.train)} | {
        name: getattr(recipe, name) for name in ("data_dir", "model", "augmentation", "precision")} | {
        "image_size": recipe.final_image_size}
    return result | report.conclude(result)


def row(stage: Stage, size: float) -> dict:
    rate = statistics.median(stage.rates[1:])
    return {"name": stage.name, "images_per_second": rate, "megabytes_per_second": rate * size / 1e6,
            "threads": stage.threads}


def build_stages(recipe, launch, dataset, world, threads, batch_size, stack) -> tuple[list[Stage], float]:
    """Returns the stages in the order of their turns, and the mean size of an encoded image in bytes."""
    stages, step, size = [], None, 0.0
    steps = -(-min(dataset.train.samples, MOST_SAMPLES) // batch_size)
    for count in threads:
        feed = build.make_feed(recipe, replace(launch, dali_threads=count), dataset, world)
        batches = stack.enter_context(feed.train(0, steps, batch_size, batch_size))
        parts = {name: part_of_pipeline(name, feed, batches.samples, batch_size) for name in PARTS}
        size = size or mean_size(parts["read"], steps)
        stages += [Stage(name, count, part.run, batches) for name, part in parts.items()]
        stages.append(Stage("pipeline", count, batches.__next__, batches))
        if not step:
            step, wait = make_step(recipe, dataset, launch.xla == "true")
            with errors_in_one_line(stages[-1], batch_size):
                resident = synthetic.Resident(next(batches))
            stages.append(Stage("model", None, partial(step, resident), wait=wait, ahead=0))
        stages.append(Stage("train", count, partial(step, batches.iterator), batches, wait))
    return stages, size


def part_of_pipeline(name: str, feed, samples, batch_size: int):
    """Returns data.feed's training pipeline up to the stage `name`: a DALI pipeline that returns only images."""
    from nvidia.dali import Pipeline

    recipe, device = augmentation.AUGMENTATIONS[feed.augmentation], feed.device
    part = Pipeline(batch_size=batch_size, num_threads=device.threads, device_id=device.number, seed=0)
    with scratch_folder() as folder:
        read = feed.dataset.train.kind.reader(order.file_slices(feed.dataset.train, samples), folder)
        with part:
            images, _ = read()
            columns = None
            if recipe.random and name != "read":
                numbers = augmentation.random_numbers(recipe, feed.image_size, feed.seed, 0, np.arange(len(samples)))
                columns = pipeline.by_name(pipeline.matrix_reader(numbers, folder)())
            if name == "decode":
                images = pipeline.decoded(images, columns, recipe, device)
            elif name == "augment":
                images = pipeline.augmented(images, columns, feed.image_size, recipe, device)
            part.set_outputs(images)
        part.build()
    return part


def mean_size(read, batches: int) -> float:
    """Returns the mean bytes per encoded image over at most 32 batches. read: a pipeline that only reads."""
    sizes = [shape[0] for _ in range(min(batches, 32)) for shape in read.run()[0].shape()]
    return sum(sizes) / len(sizes)


def shorter_side(split: Split, count: int = 32) -> int:
    """Returns the median of the shorter sides, in pixels, of the first images, or 0 if Pillow cannot read any."""
    from PIL import Image

    sides = []
    for encoded, _ in split.kind.records(split.paths[0], split.entries[0], range(min(count, split.file_samples[0]))):
        with contextlib.suppress(OSError), Image.open(io.BytesIO(encoded)) as image:
            sides.append(min(image.size))
    return round(statistics.median(sides or [0]))


def make_step(recipe, dataset, xla: bool):
    """Returns (a training step as in train.py, a function that waits until the device has finished the last one)."""
    model = build.make_model(recipe, dataset)
    optimizer = build.make_optimizer(recipe, model, GradientExchange())
    step = make_train_step(model, optimizer, Totals(), accumulation_steps=1, xla=xla)
    # A step updates the first layer's weights last. The rate is 0, so the weights do not change and stay finite.
    return (partial(step, learning_rate=tf.constant(0.0), momentum=tf.constant(recipe.momentum)),
            model.trainable_variables[0].numpy)


@contextlib.contextmanager
def errors_in_one_line(stage: Stage | None = None, batch_size: int = 0):
    """Turns an error of DALI or TensorFlow into a UserError, with the record's name if it is known."""
    try:
        yield
    except (tf.errors.OpError, RuntimeError) as error:
        if not stage or not stage.batches:
            raise UserError(reason(error)) from None
        raise UserError(f"{stage.name}: {input_reason(error, stage.batches, stage.done * batch_size)}") from None
