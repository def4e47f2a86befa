"""Where the time goes, stage by stage, on this machine: `uv run python -m training.benchmark --data_dir=D --model=M`.

    read        the format's reader alone
    decode      + the decoder, of the part of each image that the augmentation asks for
    augment     + resizing, flipping and what else the augmentation does
    pipeline    all of it as train.py has it, batches arriving in TensorFlow
    model       steps of training on a batch that stays on the device
    train       both together: steps of training on what the pipeline gives

It prints the table of the GTC slides ("Throughput comparison"), which stage limits, and what to change. MB/s are always
those of the encoded images, in 1e6 bytes: what a disk has to deliver at that rate.

The stages take turns, so that a drift of the machine touches all alike; a rate is the median of a stage's turns.
Reading is measured warm: the same samples, 65,536 at most, are read again and again, and stay in the page cache where
they fit. For the disk's own speed drop the cache before (echo 3 > /proc/sys/vm/drop_caches) and take short --seconds,
or a dataset larger than memory.
"""
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from absl import flags as absl_flags

import model_zoo
from data import augmentation, order, pipeline, synthetic
from data.dataset import DatasetError, Split
from data.feed import Batches
from data.formats import tfrecord
from data.named import open_named
from reporting import stages as report
from reporting.standard_output import json_alone_on_stdout
from training import flags, workers
from training.errors import UserError

TURNS = 5
MOST_SAMPLES = 65_536
AHEAD = 4  # batches: more than DALI makes ready while the other stages have their turns
PARTS = ("read", "decode", "augment")
BORROWED = ("data_dir", "model", "augmentation", "image_size", "precision", "dali_device", "hw_decoder_load")
OWN = ("dali_threads", "batch_size", "seconds", "output_dir", "json")


@dataclass
class Stage:
    """What is measured: `batch` processes a batch, `wait` returns when the device has done it.

    ahead: batches that may lie ready. batches: knows which record cannot be read. rates: images per second, by turn.
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
        """Uses up what lies ready, then measures for so many seconds, one batch at least."""
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
    """Waits until the pipelines of other stages have filled their queues, and this process's threads rest."""
    end, used = time.perf_counter() + longest, -1.0
    while time.perf_counter() < end and time.process_time() - used > 0.005:
        used = time.process_time()
        time.sleep(0.02)


def measure(config, dataset, threads: list[int] | None) -> dict:
    """--json's content."""
    worker = workers.start(config.seed)
    device = workers.dali_device(config.dali_device, worker)
    threads = threads or [worker.cores]
    with contextlib.ExitStack() as stack:
        with one_line():
            stages, size = build_stages(config, dataset, worker, threads, stack)
        for number in range(1 + TURNS):  # in the first one, things are compiled
            for stage in stages:
                with one_line(stage, config.batch_size):
                    stage.turn(config.batch_size, config.seconds / TURNS if number else 0)
        rows = [row(stage, size) for stage in stages]
    result = {
        "stages": sorted(rows, key=lambda row: list(report.TITLES).index(row["name"])), "threads": threads,
        "cores": worker.cores, "gpu": worker.gpu is not None, "dali_device": device, "data_dir": config.data_dir,
        "format": dataset.format, "image_bytes": size, "shorter_side": shorter_side(dataset.train),
        **{name: getattr(config, name) for name in ("model", "image_size", "batch_size", "augmentation", "precision")}}
    return result | report.conclude(result)


def row(stage: Stage, size: float) -> dict:
    rate = statistics.median(stage.rates[1:])
    return {"name": stage.name, "images_per_second": rate, "megabytes_per_second": rate * size / 1e6,
            "threads": stage.threads}


def build_stages(config, dataset, worker, threads, stack) -> tuple[list[Stage], float]:
    """The stages in the order of their turns, and the mean size of an encoded image in bytes."""
    from training import fit

    stages, step, size = [], None, 0.0
    steps = -(-min(dataset.train.samples, MOST_SAMPLES) // config.batch_size)
    for count in threads:
        feed = fit.make_feed(SimpleNamespace(**vars(config) | {"dali_threads": count}), dataset, worker)
        batches = stack.enter_context(feed.train(0, steps, config.batch_size, config.batch_size))
        parts = {name: part_of_pipeline(name, feed, batches.samples, config.batch_size) for name in PARTS}
        size = size or mean_size(parts["read"], steps)
        stages += [Stage(name, count, part.run, batches) for name, part in parts.items()]
        stages.append(Stage("pipeline", count, batches.__next__, batches))
        if not step:
            step, wait = make_step(config, dataset)
            with one_line(stages[-1], config.batch_size):
                resident = synthetic.Resident(next(batches))
            stages.append(Stage("model", None, partial(step, resident), wait=wait, ahead=0))
        stages.append(Stage("train", count, partial(step, batches.iterator), batches, wait))
    return stages, size


def part_of_pipeline(name: str, feed, samples, batch_size: int):
    """What data.feed builds for training, as far as the stage `name`: a DALI pipeline that gives images alone."""
    from nvidia.dali import Pipeline

    recipe, device = augmentation.AUGMENTATIONS[feed.augmentation], feed.device
    part = Pipeline(batch_size=batch_size, num_threads=device.threads, device_id=device.number, seed=0)
    with tempfile.TemporaryDirectory(prefix="bigbatch-index-") as folder:
        read = feed.dataset.train.kind.reader(order.pieces(feed.dataset.train, samples), Path(folder))
        with part:
            images, _ = read()
            columns = None
            if recipe.random and name != "read":
                draws = augmentation.draw(recipe, feed.image_size, feed.seed, 0, np.arange(len(samples)))
                columns = pipeline.by_name(tfrecord.float_reader(draws, Path(folder))())
            if name == "decode":
                images = pipeline.decoded(images, columns, recipe, device)
            elif name == "augment":
                images = pipeline.augmented(images, columns, feed.image_size, recipe, device)
            part.set_outputs(images)
        part.build()
    return part


def mean_size(read, batches: int) -> float:
    """Bytes an encoded image, over so many batches, 32 at most, of a pipeline that reads alone."""
    sizes = [shape[0] for _ in range(min(batches, 32)) for shape in read.run()[0].shape()]
    return sum(sizes) / len(sizes)


def shorter_side(split: Split, count: int = 32) -> int:
    """The median of the shorter sides, in pixels, of the first images; 0 where Pillow cannot tell."""
    from PIL import Image

    sides = []
    for encoded, _ in split.kind.records(split.paths[0], split.entries[0], range(min(count, split.file_samples[0]))):
        with contextlib.suppress(OSError), Image.open(io.BytesIO(encoded)) as image:
            sides.append(min(image.size))
    return round(statistics.median(sides or [0]))


def make_step(config, dataset):
    """(a step of training as train.py makes it, a function that waits until the device has done the last one)."""
    import tensorflow as tf

    from training import fit
    from training.step import Totals, make_train_step

    model = fit.make_model(config, dataset)
    step = make_train_step(model, fit.make_optimizer(config, model), Totals(), accumulation_steps=1)
    # A step updates the first layer's weights last. The rate is 0: the weights stay as they are, and finite.
    return (partial(step, learning_rate=tf.constant(0.0), momentum=tf.constant(config.momentum)),
            model.trainable_variables[0].numpy)


@contextlib.contextmanager
def one_line(stage: Stage | None = None, batch_size: int = 0):
    """Raises UserError, with the record's name where it is known, for what DALI or TensorFlow cannot do."""
    import tensorflow as tf

    try:
        yield
    except (tf.errors.OpError, RuntimeError) as error:
        if not stage or not stage.batches:
            raise UserError(workers.reason(error)) from None
        read = stage.done * batch_size % len(stage.batches.samples)
        raise UserError(f"{stage.name}: {workers.input_reason(error, stage.batches, read)}") from None


def parse(argv) -> tuple[SimpleNamespace, list[int] | None]:
    """(what training.fit wants to know, train.py's defaults but for the flags here; thread counts or None).

    Raises flags.UsageError.
    """
    values, defaults = define()
    try:
        rest = values(argv)
        if rest[1:]:
            raise absl_flags.Error(f"'{rest[1]}' is not a flag; training.benchmark --help lists them")
    except (absl_flags.Error, UnicodeDecodeError) as error:
        raise flags.UsageError(" ".join(str(error).split())) from None
    if values.data_dir.startswith(f"{synthetic.NAME}:"):
        raise flags.UsageError(f"flag --data_dir={values.data_dir}: there is nothing to read; the stage `model` "
                               "measures without input, whatever the dataset")
    config = SimpleNamespace(**{name: defaults[name].value for name in defaults} |
                             {name: values[name].value for name in values})
    config.image_size = config.image_size or model_zoo.MODELS[config.model].image_size
    return config, values.dali_threads and list(dict.fromkeys(map(int, values.dali_threads)))


def define() -> tuple[absl_flags.FlagValues, absl_flags.FlagValues]:
    """(the flags of this command, train.py's with their defaults)."""
    values, defaults = absl_flags.FlagValues(), flags.define()
    for name in BORROWED:
        values[name] = defaults[name]
    values.set_default("augmentation", "crop_flip")
    v = {"flag_values": values}
    absl_flags.DEFINE_integer("batch_size", 64, "Micro-batch: images that are read, and trained on, at a time.",
                              lower_bound=1, upper_bound=2**20, **v)
    absl_flags.DEFINE_list("dali_threads", None, "DALI's threads; several numbers, 1,2,4, to measure with each; by "
                           "default as many as there are cores.", **v)
    absl_flags.DEFINE_float("seconds", 5.0, "How long each stage is measured, in all.", lower_bound=0.01,
                            upper_bound=1e6, **v)
    absl_flags.DEFINE_string("output_dir", None, "A folder for benchmark.json and benchmark.html, a bar chart.", **v)
    absl_flags.DEFINE_bool("json", False, "Print JSON on standard output instead of the table.", **v)
    absl_flags.register_validator(
        "dali_threads", lambda texts: all(text.isdecimal() and 0 < int(text) <= 1024 for text in texts or ()),
        "wants numbers of threads, such as 2 or 1,2,4", flag_values=values)
    return values, defaults


def help_text() -> str:
    return "\n".join([__doc__, *flags.described(define()[0], (*BORROWED, *OWN))])


def main(argv) -> int:
    """Runs a command line; returns the exit code: 0 done, 2 a flag is wrong, 1 anything else is."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if {"--help", "-help", "-h", "--helpfull"} & set(argv[1:]):
        print(help_text())
        return 0
    try:
        config, threads = parse(argv)
        with json_alone_on_stdout():
            result = measure(config, open_named(config.data_dir), threads)
            if config.output_dir:
                print(f"report: {report.write_stages(Path(config.output_dir), result)}", file=sys.stderr)
            print(json.dumps(result) if config.json else "\n".join(report.lines(result)), flush=True)
        return 0
    except (flags.UsageError, UserError, DatasetError, OSError, ValueError) as error:
        print(f"training.benchmark: {error}", file=sys.stderr)
        return 2 if isinstance(error, flags.UsageError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv))
