"""Starts the observers of a training and prints what is about to be trained. Also the observer of --profile."""
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from common.errors import complain, reason
from common.run_folder import TENSORBOARD, RunFolder
from data import mixing
from data.pipeline import DecoderSettings
from hints.before import on_plan
from model_zoo.cost import counted
from plan.forecast import cpu_time
from training.build import Setup
from training.observer import Observer, RunInfo, Update


def start_observers(setup: Setup, folder: RunFolder, hosts: dict[str, int], observers: Sequence[Observer],
                    held: contextlib.ExitStack) -> None:
    """Starts the observers, and prints what is about to be trained. The end of `held` closes the observers.

    hosts: number of workers on each host.
    """
    settings = setup.settings
    images = None if setup.feed.dataset.is_synthetic else functools.partial(training_images, setup)
    run = RunInfo(
        folder.path, plan=setup.plan.as_json(), flags=settings.given, flags_text=settings.text,
        recipe=settings.source.file, dataset=setup.feed.dataset, hosts=hosts, progress=setup.state.progress,
        origins=settings.source.origins, images=images, expected=settings.run.expect)
    if settings.source.is_default:
        print("recipe:", settings.source.file, *settings.source.fitted, file=sys.stderr)
    for line in (*on_plan(settings, setup.plan, setup.world.local_size), *forecast(setup)):
        print(line, file=sys.stderr)
    print(f"run: {folder.path}", file=sys.stderr)
    for observer in observers:
        held.callback(observer.close)
        observer.start(run)


def forecast(setup: Setup) -> list[str]:
    """Returns a line with the time that a training on CPUs will take. There is none on GPUs."""
    plan, model, world = setup.plan, setup.state.model, setup.world
    images = plan.samples - plan.position(setup.state.progress.step)
    if world.gpu is not None or None in model.input_shape[1:] or not images:
        return []
    return [cpu_time(setup.settings.recipe, images, counted(model).multiply_adds, world.size * world.cores)]


def training_images(setup: Setup, number: int, largest: int) -> tuple[np.ndarray, list[str]]:
    """Returns the first images of the training as it sees them, uint8 (number, size, size, 3), and their classes.

    Mixed images have both classes and their weights. It uses an input pipeline of its own, on the CPU. Larger images
    are shrunk to `largest` pixels. number: even.
    """
    feed = dataclasses.replace(setup.feed, shard=0, shards=1, device=DecoderSettings())
    size = min(setup.plan.phases[0].image_size or feed.image_size, largest)
    with feed.train(0, 1, number, number, image_size=size) as batches:
        images, labels, *rows = next(batches)
    names = [setup.feed.dataset.classes[label] for label in labels.numpy().flat]
    if not rows:
        return images.numpy(), names
    mixed = tf.cast(tf.round(mixing.mixed(images, *rows)), tf.uint8).numpy()
    return mixed, [shares(name, names[index ^ 1], float(weight))
                   for index, (name, weight) in enumerate(zip(names, mixing.label_weight(*rows), strict=True))]


def shares(own: str, other: str, weight: float) -> str:
    """Returns the label of a mixed image, the larger share first. weight: of its own class."""
    if weight < 0.5:
        own, other, weight = other, own, 1 - weight
    return own if own == other or weight >= 0.995 else f"{own} {weight:.0%}, {other} {1 - weight:.0%}"


class Profile(Observer):
    """Profiles the steps from `first` to `end` (exclusive) into FOLDER/tensorboard.

    The profile starts before the first of them is launched. It stops when the results of the last are there, which can
    be after the launch of the next step. A run that resumes among them profiles the rest.
    """

    def __init__(self, first: int, end: int):
        self._steps = range(first, end)
        self._is_due = True
        self._is_open = False
        self._profiled = []

    def start(self, run: RunInfo) -> None:
        self._folder = run.folder / TENSORBOARD
        if run.progress.step >= self._steps.stop:
            self._give_up(f"training continues after step {run.progress.step}")
        elif run.plan["steps"] <= self._steps.start:
            self._give_up(f"the last step is {run.plan['steps'] - 1}")

    def _give_up(self, why):
        complain(f"warning: --profile={self._steps.start}:{self._steps.stop}: no profile is written, because {why}")
        self._is_due = False

    @contextlib.contextmanager
    def launching(self, number: int):
        """Context manager for the launch of a step. It marks the step in the profile."""
        if self._is_due and number in self._steps:
            tf.profiler.experimental.start(str(self._folder))
            self._is_due = False
            self._is_open = True
        if not (self._is_open and number in self._steps):
            yield
            return
        self._profiled.append(number)
        with tf.profiler.experimental.Trace("train", step_num=number, _r=1):
            yield

    def step(self, update: Update) -> None:
        if self._is_open and update.number >= self._steps[-1]:
            self._stop()

    def close(self) -> None:
        if self._is_open:
            self._stop()
        elif self._is_due:
            self._give_up(f"training ended before step {self._steps.start}")

    def _stop(self):
        self._is_open = False
        try:
            tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            complain(f"warning: the profile could not be written: {reason(error)}")
        else:
            complain(f"profile of steps {self._profiled[0]} to {self._profiled[-1]}: tensorboard "
                     f"--logdir={self._folder}")
